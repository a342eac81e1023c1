"""Keeps a server under mixed traffic for long, and checks that it neither grows nor loses count.

``plan`` says what is sent, ``library`` holds the documents, which come and go, ``clients`` sends
everything and counts what came of it, ``retrying`` sends again what is refused while the server is
restarted, ``readings`` looks at it from outside, ``checks`` judges, and ``run`` brings all
together.
"""
