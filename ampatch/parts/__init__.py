"""The parts of a session. Each owns one concern of it, and answers the questions that `part.Part` asks.

Read `part.py` first. A part gets those that it uses from `ampatch.session`; `adopted.py` and `state_dicts.py` are no
parts, and are asked nothing. Must not know
whether the session is live.
"""
