"""The three tables: events, operations, messages. Columns inside; values when somebody looks at them."""
