"""Talk to a model: `padfree generate` and `padfree chat`.

find_model     finds the files of a model folder, Hub id, run folder or adapter folder
speaker        Speaker: a loaded model and its tokenizer; answers prompts
chat_session   a chat of several turns, which keeps the token ids of earlier answers
text_stream    decodes token ids to text while they are generated
"""
