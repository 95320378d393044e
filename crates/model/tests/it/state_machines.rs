//! Properties of every state machine, and the edges of each.

use std::{collections::BTreeSet, path::PathBuf};

use windlass_model::{
    container, fleet, gateway, instance, job, managed_job, run,
    state_machine::{StateMachine, Status as _, Step, StrEnum, render_table},
    task, volume,
};

/// Runs a generic check for every state machine.
macro_rules! every_machine {
    ($check:ident) => {
        $check::<run::RunLifecycle>();
        $check::<job::JobLifecycle>();
        $check::<instance::InstanceLifecycle>();
        $check::<fleet::FleetLifecycle>();
        $check::<volume::VolumeLifecycle>();
        $check::<gateway::GatewayLifecycle>();
        $check::<gateway::GatewayReplicaLifecycle>();
        $check::<managed_job::ManagedTaskLifecycle>();
        $check::<managed_job::ScheduleLifecycle>();
        $check::<container::ContainerLifecycle>();
        $check::<task::ShimTaskLifecycle>();
    };
}

type Edges = BTreeSet<(&'static str, &'static str)>;

fn edges<M: StateMachine>() -> Edges {
    let mut edges = Edges::new();
    for &status in M::Status::ALL {
        for &event in M::Event::ALL {
            match M::step(status, event) {
                Step::To(to) => {
                    assert_ne!(status, to, "{}: `{event:?}` in {status:?} should say Stay", M::NAME);
                    edges.insert((status.as_str(), to.as_str()));
                }
                Step::Stay | Step::Refuse => {}
            }
        }
    }
    edges
}

/// Parses lines of `from, from -> to, to`, one or more statuses on either side.
fn read_edges(text: &'static str) -> Edges {
    let mut edges = Edges::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (from, to) = line.split_once("->").unwrap();
        for from in from.split(',') {
            edges.extend(to.split(',').map(|to| (from.trim(), to.trim())));
        }
    }
    edges
}

#[track_caller]
fn check<M: StateMachine>(expected: &'static str) {
    let (found, expected) = (edges::<M>(), read_edges(expected));
    let extra: Vec<_> = found.difference(&expected).collect();
    let missing: Vec<_> = expected.difference(&found).collect();
    assert!(extra.is_empty() && missing.is_empty(), "{}: extra {extra:?}, missing {missing:?}", M::NAME);
}

#[test]
fn r5_a_run_has_the_listed_edges_and_no_others() {
    check::<run::RunLifecycle>(
        "
        pending -> submitted
        submitted -> provisioning, running
        provisioning -> submitted, running
        running -> submitted, provisioning
        submitted, provisioning, running -> pending
        pending, submitted, provisioning, running -> terminating
        terminating -> terminated, failed, done, pending
        ",
    );
}

#[test]
fn r5_a_job_has_the_listed_edges_and_no_others() {
    check::<job::JobLifecycle>(
        "
        submitted -> provisioning
        provisioning -> pulling, running
        pulling -> running
        submitted, provisioning, pulling, running -> terminating
        terminating -> terminated, aborted, failed, done
        ",
    );
}

#[test]
fn r5_an_instance_has_the_listed_edges_and_no_others() {
    check::<instance::InstanceLifecycle>(
        "
        pending -> provisioning, idle, terminated
        provisioning -> idle, busy, terminating
        idle -> busy, terminating
        busy -> idle, terminating
        terminating -> terminated
        # A user may delete what does not exist yet.
        pending -> terminating
        ",
    );
}

#[test]
fn r5_a_fleet_has_the_listed_edges_and_no_others() {
    check::<fleet::FleetLifecycle>(
        "
        active -> terminating
        terminating -> terminated
        # The two statuses that only the wire knows.
        submitted -> active, failed, terminating
        ",
    );
}

#[test]
fn r5_a_volume_has_the_listed_edges_and_no_others() {
    check::<volume::VolumeLifecycle>(
        "submitted -> active, failed, provisioning\nprovisioning -> active, failed",
    );
}

#[test]
fn r5_a_gateway_has_the_listed_edges_and_no_others() {
    check::<gateway::GatewayLifecycle>("submitted -> provisioning, failed\nprovisioning -> running, failed");
    check::<gateway::GatewayReplicaLifecycle>(
        "
        submitted -> provisioning
        provisioning -> running
        submitted, provisioning, running -> terminating
        terminating -> terminated
        ",
    );
}

#[test]
fn a_managed_job_has_the_22_listed_transitions_and_no_others() {
    check::<managed_job::ManagedTaskLifecycle>(
        "
        # 2, 3, 4, 5
        PENDING -> STARTING
        STARTING -> PENDING
        STARTING -> RUNNING
        PENDING -> RUNNING
        # 6, 7, 8, 9
        RUNNING -> RECOVERING
        RECOVERING -> PENDING
        PENDING -> RECOVERING
        RECOVERING -> RUNNING
        # 10-11, 12-13, 14-16
        STARTING, RECOVERING -> FAILED_NO_RESOURCE
        STARTING, RECOVERING -> FAILED_PRECHECKS
        RUNNING -> SUCCEEDED, FAILED, FAILED_SETUP
        # 17, 18, 19
        PENDING, STARTING, RUNNING, RECOVERING -> CANCELLING
        CANCELLING -> CANCELLED
        CANCELLING -> SUCCEEDED, FAILED, FAILED_SETUP, FAILED_PRECHECKS, FAILED_NO_RESOURCE
        # 20; from RECOVERING itself it stays
        PENDING, STARTING, RUNNING -> RECOVERING
        # 21
        PENDING, STARTING, RUNNING, RECOVERING, CANCELLING -> FAILED_CONTROLLER
        SUCCEEDED, CANCELLED, FAILED, FAILED_SETUP -> FAILED_CONTROLLER
        FAILED_PRECHECKS, FAILED_NO_RESOURCE -> FAILED_CONTROLLER
        # 22
        PENDING -> CANCELLED
        ",
    );
}

#[test]
fn a_managed_jobs_schedule_has_the_listed_edges_and_no_others() {
    check::<managed_job::ScheduleLifecycle>(
        "
        INACTIVE -> WAITING
        WAITING -> LAUNCHING
        LAUNCHING -> ALIVE, ALIVE_BACKOFF
        ALIVE_BACKOFF -> ALIVE_WAITING
        ALIVE -> ALIVE_WAITING
        ALIVE_WAITING -> LAUNCHING
        LAUNCHING, ALIVE, ALIVE_WAITING, ALIVE_BACKOFF -> DONE
        INACTIVE, WAITING -> DONE
        ",
    );
}

#[test]
fn c2_a_container_has_the_listed_edges_and_no_others() {
    check::<container::ContainerLifecycle>(
        "
        Queued -> Locked, Cancelled
        Locked -> Queued, Running, Cancelled
        Running -> Complete, Cancelled
        ",
    );
}

#[test]
fn a_task_of_a_shim_has_the_listed_edges_and_no_others() {
    check::<task::ShimTaskLifecycle>(
        "
        pending -> preparing
        preparing -> pulling
        pulling -> creating
        creating -> running
        pending, preparing, pulling, creating, running -> terminated
        ",
    );
}

#[test]
fn g8_a_task_is_removed_only_after_its_end() {
    for &status in task::Status::ALL {
        let answer = task::step(status, task::Event::RemoveRequested);
        assert_eq!(answer == Step::Refuse, status.is_active(), "{status}");
    }
}

#[test]
fn r3_a_final_status_changes_only_by_an_internal_error() {
    fn check<M: StateMachine>() {
        for (from, to) in edges::<M>() {
            let from = M::Status::ALL.iter().find(|s| s.as_str() == from).unwrap();
            // Only managed jobs have an internal error that may follow any status.
            assert!(!from.is_final() || to == "FAILED_CONTROLLER", "{}: {from:?} -> {to}", M::NAME);
        }
    }
    every_machine!(check);
}

#[test]
fn a_stop_is_accepted_in_every_status_that_is_not_final() {
    fn check<M: StateMachine>() {
        for &status in M::Status::ALL.iter().filter(|status| !status.is_final()) {
            for &stop in M::STOP {
                assert_ne!(M::step(status, stop), Step::Refuse, "{}: {status:?} refuses {stop:?}", M::NAME);
            }
        }
    }
    every_machine!(check);
}

#[test]
fn every_status_can_be_reached() {
    fn check<M: StateMachine>() {
        let mut reached: BTreeSet<_> = M::START.iter().map(|s| s.as_str()).collect();
        let edges = edges::<M>();
        while let Some((_, to)) =
            edges.iter().find(|(from, to)| reached.contains(from) && !reached.contains(to))
        {
            reached.insert(to);
        }
        let all: BTreeSet<_> = M::Status::ALL.iter().map(|s| s.as_str()).collect();
        assert_eq!(reached, all, "{}", M::NAME);
    }
    every_machine!(check);
}

#[test]
fn every_status_can_end() {
    fn check<M: StateMachine>() {
        let edges = edges::<M>();
        let mut ends: BTreeSet<_> =
            M::Status::ALL.iter().filter(|s| s.is_final()).map(|s| s.as_str()).collect();
        // Volumes and gateways end by deletion, which every status accepts and no status represents.
        let deleted = M::NAME == "volume" || M::NAME == "gateway";
        for &status in M::Status::ALL {
            if deleted && M::STOP.iter().all(|&stop| M::step(status, stop) == Step::Stay) {
                ends.insert(status.as_str());
            }
        }
        while let Some((from, _)) = edges.iter().find(|(from, to)| ends.contains(to) && !ends.contains(from))
        {
            ends.insert(from);
        }
        let all: BTreeSet<_> = M::Status::ALL.iter().map(|s| s.as_str()).collect();
        assert_eq!(ends, all, "{}", M::NAME);
    }
    every_machine!(check);
}

#[test]
fn every_status_and_event_explains_itself() {
    fn check<M: StateMachine>() {
        let explained = |about: &str| !about.is_empty() && !about.ends_with('.');
        assert!(M::Status::ALL.iter().all(|status| explained(status.about())), "{}", M::NAME);
        assert!(M::Event::ALL.iter().all(|event| explained(event.about())), "{}", M::NAME);
    }
    every_machine!(check);
}

#[test]
fn every_event_is_accepted_somewhere() {
    fn check<M: StateMachine>() {
        for &event in M::Event::ALL {
            let taken = M::Status::ALL.iter().any(|&status| M::step(status, event) != Step::Refuse);
            assert!(taken, "{}: {event:?} is refused everywhere", M::NAME);
        }
    }
    every_machine!(check);
}

/// Compares with the reviewed files. `UPDATE=1` rewrites them.
#[test]
fn the_state_tables_in_the_docs_match_the_code() {
    fn check<M: StateMachine>() {
        compare(M::NAME, &render_table::<M>());
    }
    every_machine!(check);
}

#[expect(clippy::disallowed_methods, reason = "the test compares files of the repository")]
#[track_caller]
fn compare(name: &str, rendered: &str) {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/transitions");
    let path = root.join(format!("{name}.txt"));
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(&path, rendered).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(stored == rendered, "{} differs from the code; run with UPDATE=1", path.display());
}
