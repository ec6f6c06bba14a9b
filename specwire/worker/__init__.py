"""What both workers need and no service may take from another: sessions, the engine thread, the stream shell, registration.

Nothing is exported here; import the room you need.
"""
