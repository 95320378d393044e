//! Tests of the model as data: one binary, one module per part.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it stands")]

mod config;
mod deadline_policy;
mod device_allocator;
mod diff;
mod events_reference;
mod fields;
mod fleets_and_instances;
mod forecast;
mod fuzz;
mod gpus;
mod jobs_running;
mod jobs_submitted;
mod jobs_terminating;
mod managed_jobs;
mod managed_jobs_cancel;
mod managed_jobs_candidates;
mod managed_jobs_fixture;
mod managed_jobs_properties;
mod placement;
mod placement_for_good;
mod placement_offers;
mod placement_properties;
mod preemption;
mod queue_order;
mod runs;
mod runs_fixture;
mod runs_history;
mod runs_properties;
mod runs_retry;
mod runs_schedule;
mod skypilot;
mod state_machine_words;
mod state_machines;
mod update_modes;
