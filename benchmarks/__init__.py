"""Every speed claim of Tollbridge, as a program that says whether it holds on this machine."""
