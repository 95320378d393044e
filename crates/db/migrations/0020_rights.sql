-- Who made a fleet; absent where the server made it. Its creator and the project's managers may change it.
ALTER TABLE fleets ADD COLUMN user_id TEXT REFERENCES users (id);
UPDATE fleets SET user_id = (SELECT e.actor_user_id FROM events e WHERE e.entity_id = fleets.id
    AND e.from_status IS NULL AND e.to_status IS NOT NULL AND e.actor_user_id IS NOT NULL ORDER BY e.seq LIMIT 1);

-- Whose runs may use a secret: `everyone`, `managers`, or a JSON list of ids of users.
ALTER TABLE secrets ADD COLUMN users TEXT NOT NULL DEFAULT 'everyone';

-- The right to manage SSH fleets came with every role. Global admins give it to members, one by one.
UPDATE members SET can_manage_ssh_fleets = FALSE;

-- A project uses the backends that it was granted. The first project has those of the server itself.
-- sqlite
INSERT INTO backends (id, project_id, kind, config, created_at)
    SELECT lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-8'
        || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))), p.id, k.column1, '{}', p.created_at
    FROM projects p, (VALUES ('local'), ('slurm')) k
    WHERE p.name = 'main' AND NOT p.deleted
    ON CONFLICT (project_id, kind) DO NOTHING;
-- postgres
INSERT INTO backends (id, project_id, kind, config, created_at)
    SELECT CAST(gen_random_uuid() AS TEXT), p.id, k.kind, '{}', p.created_at
    FROM projects p, (VALUES ('local'), ('slurm')) AS k (kind)
    WHERE p.name = 'main' AND NOT p.deleted
    ON CONFLICT (project_id, kind) DO NOTHING;
-- both
