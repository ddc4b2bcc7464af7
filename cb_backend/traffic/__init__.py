"""What is asked of an engine, before it is sent: traces, lengths, arrival times. Shared with `client/load_test.py`."""
