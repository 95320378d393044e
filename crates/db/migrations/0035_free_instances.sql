-- The instances on which a job could be placed now. Most rounds of placement read no others.
CREATE INDEX instances_free ON instances (fleet_id) WHERE NOT finished AND NOT deleted AND busy_blocks < coalesce(total_blocks, 1) AND status IN ('idle', 'busy') AND NOT unreachable AND termination_asked_at IS NULL;
