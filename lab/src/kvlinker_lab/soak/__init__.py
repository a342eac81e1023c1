"""Keeps a server under mixed traffic for long, and checks that it neither grows nor loses count.

``plan`` describes the traffic, ``library`` holds the documents, which come and go, ``clients``
sends requests and counts their outcomes, ``retrying`` sends requests again that a restarting server
refused, ``readings`` reads the server's figures from outside, ``checks`` judges them, and ``run``
runs the soak.
"""
