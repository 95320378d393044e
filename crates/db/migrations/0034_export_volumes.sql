-- Volumes that a project shares with others.
CREATE TABLE export_volumes (
    export_id TEXT NOT NULL REFERENCES exports (id),
    volume_id TEXT NOT NULL REFERENCES volumes (id)
);
CREATE UNIQUE INDEX export_volumes_key ON export_volumes (export_id, volume_id);
CREATE INDEX export_volumes_volume ON export_volumes (volume_id);

-- Volumes that jobs of a project may mount: its own, and those that are exported to it.
CREATE VIEW usable_volumes AS
    SELECT v.project_id AS project_id, v.id AS volume_id FROM volumes v
    UNION ALL
    SELECT i.project_id, x.volume_id FROM imports i JOIN export_volumes x ON x.export_id = i.export_id
    UNION ALL
    SELECT p.id, x.volume_id FROM exports e JOIN export_volumes x ON x.export_id = e.id
    JOIN projects p ON p.id <> e.project_id WHERE e.is_global;
