"""Tools that a policy calls by turns: their schemas, the notations of calls, and the tools that come with megasharp."""
