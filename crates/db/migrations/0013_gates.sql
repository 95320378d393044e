-- Nodes of a task begin together: `reached` when one is prepared, `open` when it was told to go on.
ALTER TABLE jobs ADD COLUMN gate TEXT;
