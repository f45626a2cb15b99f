"""The parts of a session. Each owns one concern of it, and answers the questions that `part.Part` asks.

Read `part.py` first. A part may use the parts before it in `ampatch.session`, never those after it. Must not know
whether the session is live.
"""
