-- A project shares fleets and gateways with others by exports.
CREATE TABLE exports (
    id TEXT PRIMARY KEY,
    project_id TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    -- True if every project may use it.
    is_global BOOLEAN NOT NULL DEFAULT FALSE,
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX exports_name_key ON exports (project_id, name);
CREATE INDEX exports_global ON exports (is_global) WHERE is_global;

CREATE TABLE export_fleets (
    export_id TEXT NOT NULL REFERENCES exports (id),
    fleet_id TEXT NOT NULL REFERENCES fleets (id)
);
CREATE UNIQUE INDEX export_fleets_key ON export_fleets (export_id, fleet_id);
CREATE INDEX export_fleets_fleet ON export_fleets (fleet_id);

CREATE TABLE export_gateways (
    export_id TEXT NOT NULL REFERENCES exports (id),
    gateway_id TEXT NOT NULL REFERENCES gateways (id)
);
CREATE UNIQUE INDEX export_gateways_key ON export_gateways (export_id, gateway_id);
CREATE INDEX export_gateways_gateway ON export_gateways (gateway_id);

-- The projects that an export names.
CREATE TABLE imports (
    id TEXT PRIMARY KEY,
    export_id TEXT NOT NULL REFERENCES exports (id),
    project_id TEXT NOT NULL REFERENCES projects (id),
    created_at BIGINT NOT NULL
);
CREATE UNIQUE INDEX imports_key ON imports (export_id, project_id);
CREATE INDEX imports_project ON imports (project_id);

-- Fleets that jobs of a project may use: its own, and those that are exported to it.
CREATE VIEW usable_fleets AS
    SELECT f.project_id AS project_id, f.id AS fleet_id FROM fleets f
    UNION ALL
    SELECT i.project_id, x.fleet_id FROM imports i JOIN export_fleets x ON x.export_id = i.export_id
    UNION ALL
    SELECT p.id, x.fleet_id FROM exports e JOIN export_fleets x ON x.export_id = e.id
    JOIN projects p ON p.id <> e.project_id WHERE e.is_global;

-- Gateways that services of a project may use, likewise.
CREATE VIEW usable_gateways AS
    SELECT g.project_id AS project_id, g.id AS gateway_id FROM gateways g
    UNION ALL
    SELECT i.project_id, x.gateway_id FROM imports i JOIN export_gateways x ON x.export_id = i.export_id
    UNION ALL
    SELECT p.id, x.gateway_id FROM exports e JOIN export_gateways x ON x.export_id = e.id
    JOIN projects p ON p.id <> e.project_id WHERE e.is_global;
