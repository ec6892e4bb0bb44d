"""The tasks that ship with Castwise, on real data that ships with Python packages. Each is an ordinary
``study.Task``.
"""
