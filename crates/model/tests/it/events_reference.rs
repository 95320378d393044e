//! `docs/reference/events.md`: the kinds, objects, actors and reasons of events, from the types that write them.

use std::{fmt::Write as _, path::PathBuf};

use windlass_model::{
    container,
    event::{Entity, EventKind, Pipeline, RecordedMachine},
    fleet, gateway, instance, job, managed_job, run,
    state_machine::{Status as _, StrEnum},
    volume,
};

const HEAD: &str = "\
# Events

What happened to every object, who caused it and why. Events are written together with the change that they describe, and are never changed. \
`windlass event` lists them, `windlass event -f` follows them; `POST /api/events/list` returns them \
(`list_events` in [the API](../api/openapi.json)). This page is generated from the code.
";

/// Adds a table of names with their meanings; a type without meanings becomes a list.
fn table<E: StrEnum>(out: &mut String, heading: &str, about: &str) {
    let _ = write!(out, "\n{heading}\n\n{about}\n\n");
    if E::ALL.iter().all(|one| one.about().is_empty()) {
        let names: Vec<String> = E::ALL.iter().map(|one| format!("`{}`", one.as_str())).collect();
        let _ = writeln!(out, "{}", names.join(", "));
        return;
    }
    out.push_str("| | meaning |\n| --- | --- |\n");
    for one in E::ALL {
        let _ = writeln!(out, "| `{}` | {} |", one.as_str(), one.about());
    }
}

/// Adds the statuses of a machine and the events that change them.
fn machine<M: RecordedMachine>(out: &mut String) {
    let _ = write!(out, "\n## {}\n\n", M::NAME);
    let name = M::ENTITY.as_str();
    let _ = writeln!(
        out,
        "Object `{name}`, kind `{}`. [All transitions](../transitions/{}.txt)\n",
        M::KIND.as_str(),
        M::NAME
    );
    out.push_str("| status | meaning |\n| --- | --- |\n");
    for status in M::Status::ALL {
        let last = if status.is_final() { " (final)" } else { "" };
        let _ = writeln!(out, "| `{}`{last} | {} |", status.as_str(), status.about());
    }
    out.push_str("\n| event | meaning |\n| --- | --- |\n");
    for event in M::Event::ALL {
        let _ = writeln!(out, "| `{}` | {} |", event.as_str(), event.about());
    }
}

fn rendered() -> String {
    let mut out = HEAD.to_owned();
    table::<EventKind>(
        &mut out,
        "## Kinds",
        "Only the kinds `status` and `schedule` are changes; they name the value before and after.",
    );
    table::<Entity>(
        &mut out,
        "## Objects",
        "An event is about one object, and names those that it belongs to as further targets.",
    );
    table::<Pipeline>(
        &mut out,
        "## Actors",
        "The actor is a user (`user:ID`), the server itself (`server`), or one of its [pipelines](../concepts/pipelines.md):",
    );
    let about = "The reason of an event that ends a run, a job or an instance is one of these. Other events have the name of the event \
        below, or a word such as `created`, `updated` or `deleted`.";
    let _ = write!(out, "\n## Reasons\n\n{about}\n");
    table::<run::TerminationReason>(&mut out, "### Runs", "`termination_reason` of a run:");
    table::<job::TerminationReason>(&mut out, "### Jobs", "`termination_reason` of a submission:");
    table::<job::TerminationDetail>(
        &mut out,
        "### Details of jobs",
        "Shown next to the reason where it is too general:",
    );
    table::<instance::TerminationReason>(&mut out, "### Instances", "`termination_reason` of an instance:");
    machine::<run::RunLifecycle>(&mut out);
    machine::<job::JobLifecycle>(&mut out);
    machine::<instance::InstanceLifecycle>(&mut out);
    machine::<fleet::FleetLifecycle>(&mut out);
    machine::<volume::VolumeLifecycle>(&mut out);
    machine::<gateway::GatewayLifecycle>(&mut out);
    machine::<gateway::GatewayReplicaLifecycle>(&mut out);
    machine::<managed_job::ManagedTaskLifecycle>(&mut out);
    machine::<managed_job::ScheduleLifecycle>(&mut out);
    machine::<container::ContainerLifecycle>(&mut out);
    out
}

#[test]
#[expect(clippy::disallowed_methods, reason = "`UPDATE=1` writes the file anew")]
fn the_committed_event_reference_matches_the_code() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/events.md");
    let text = rendered();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "docs/reference/events.md is stale: run the tests with UPDATE=1");
}
