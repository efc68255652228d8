"""The three tables: events, operations, messages. Columns inside; values when they are looked at."""
