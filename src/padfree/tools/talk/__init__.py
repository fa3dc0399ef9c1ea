"""Talk to a model: `padfree generate` and `padfree chat`.

find_model     find the files of a model folder, Hub id, run folder or adapter folder
speaker        Speaker: a loaded model and its tokenizer; prompts in, answers out
chat_session   a chat of several turns, which keeps the token ids of earlier answers
text_stream    decode token ids to text while they are generated
"""
