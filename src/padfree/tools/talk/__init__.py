"""Talking to a model: `padfree generate` and `padfree chat`.

find           which files a name stands for: model folder, Hub id, run folder, adapter folder
speaker        Speaker: a loaded model and its tokenizer; prompts in, answers out
conversation   a chat of several turns, with the token ids of earlier answers
text_stream    token ids to text while they are written
"""
