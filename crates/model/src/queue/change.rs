//! Changes of one container: lock, unlock, and writes of attributes.

use serde_json::{Map, Value};

use super::{
    Container, QueueCaller, QueueRefusal, STOP_SECS_MAX, apply_patch, refuse_invalid, request::initial_status,
};
use crate::{
    container::{ContainerActor, Event, LOCKS_MAX, Status, is_allowed, step},
    state_machine::Step,
    time::Timestamp,
};

/// Results: they can be set in a final state only by the write that makes it final.
const RESULT_ATTRIBUTES: [&str; 8] = [
    "progress",
    "output",
    "output_properties",
    "exit_code",
    "log",
    "cost",
    "gateway_address",
    "interactive_session_started",
];
/// Attributes that the program inside the container may set.
const PROGRAM_ATTRIBUTES: [&str; 4] = ["progress", "runtime_status", "output", "output_properties"];

fn check_transition(
    container: &Container,
    actor: ContainerActor,
    event: Event,
) -> Result<Status, QueueRefusal> {
    let Step::To(status) = step(container.state, event) else {
        return refuse_invalid(format!(
            "cannot {event} a container that is {} (attempt {})",
            container.state, container.attempt
        ));
    };
    if is_allowed(actor, container.state, event) {
        Ok(status)
    } else {
        Err(QueueRefusal::Denied(format!("{actor} may not {event} this container")))
    }
}

/// Locks the container for the holder of `token`. `auth` names the token of the program inside.
pub fn lock(container: &Container, who: &QueueCaller, auth: &str) -> Result<Container, QueueRefusal> {
    let QueueCaller::Dispatcher { token } = who else {
        return Err(QueueRefusal::Denied("only a dispatcher token can lock containers".to_owned()));
    };
    let holder = container.locked_by_uuid.as_deref().filter(|_| container.is_held());
    let Step::To(state) = step(container.state, Event::Lock) else {
        let by = holder.map(|holder| format!(" by {holder}")).unwrap_or_default();
        return refuse_invalid(format!(
            "cannot lock: the container is {}{by} (attempt {})",
            container.state, container.attempt
        ));
    };
    if container.priority == 0 {
        return refuse_invalid("cannot lock: the container's priority is 0");
    }
    Ok(Container {
        state,
        attempt: container.attempt + 1,
        lock_count: container.lock_count + 1,
        locked_by_uuid: Some(token.clone()),
        auth_uuid: Some(auth.to_owned()),
        scheduling_status: String::new(),
        ..container.clone()
    })
}

/// Releases the lock. `release`: nothing failed, and the lock does not count.
pub fn unlock(
    container: &Container,
    who: &QueueCaller,
    attempt: Option<u64>,
    release: bool,
    now: Timestamp,
) -> Result<Container, QueueRefusal> {
    if container.state != Status::Locked {
        return refuse_invalid(format!("cannot unlock a container that is {}", container.state));
    }
    let Some(actor @ (ContainerActor::Holder | ContainerActor::Executor)) = who.actor(container) else {
        return Err(QueueRefusal::Denied("the container is not locked by this caller".to_owned()));
    };
    check_attempt(container, attempt)?;
    let is_spent = !release && container.lock_count >= LOCKS_MAX;
    let state =
        check_transition(container, actor, if is_spent { Event::UnlockSpent } else { Event::Unlock })?;
    let mut free = Container {
        state,
        lock_count: if release { container.lock_count.saturating_sub(1) } else { container.lock_count },
        locked_by_uuid: None,
        auth_uuid: None,
        runtime_status: initial_status(&container.work),
        ..container.clone()
    };
    if is_spent {
        free.finished_at = Some(now);
        set_reason(&mut free, "attempts", &format!("returned to the queue {} times", container.lock_count));
    }
    Ok(free)
}

/// Sets the time that the program has to exit once it is stopped.
#[must_use]
pub fn with_stop_duration(container: &Container, secs: u64) -> Container {
    Container { stop_duration: Some(secs.min(STOP_SECS_MAX)), ..container.clone() }
}

fn set_reason(container: &mut Container, reason: &str, error: &str) {
    container.runtime_status.insert("reason".to_owned(), reason.into());
    container.runtime_status.entry("error").or_insert_with(|| error.into());
}

fn add_warning(container: &mut Container, warning: &str) {
    let before = container.runtime_status.get("warning").and_then(Value::as_str);
    let all = before.map(|before| format!("{before}; ")).unwrap_or_default() + warning;
    container.runtime_status.insert("warning".to_owned(), all.into());
}

/// Error of the last attempt, while the container waits for the next one or that one prepares.
pub fn attempt_error(container: &Container) -> Option<&str> {
    let waits = matches!(container.state, Status::Queued | Status::Locked);
    let warning = container.runtime_status.get("warning").filter(|_| waits)?.as_str()?;
    warning.find("attempt ").and_then(|start| warning.get(start..))
}

fn check_attempt(container: &Container, attempt: Option<u64>) -> Result<(), QueueRefusal> {
    match attempt {
        Some(attempt) if attempt != container.attempt => refuse_invalid(format!(
            "attempt {attempt} is not the current one: the container is {} in attempt {}",
            container.state, container.attempt
        )),
        Some(_) | None => Ok(()),
    }
}

/// Writes attributes, including `state`. `attempt` in the patch is the fence.
pub fn update(
    container: &Container,
    who: &QueueCaller,
    patch: &Map<String, Value>,
    now: Timestamp,
) -> Result<Container, QueueRefusal> {
    let mut patch = patch.clone();
    let attempt = match patch.remove("attempt") {
        None | Some(Value::Null) => None,
        Some(given) => match given.as_u64() {
            Some(given) => Some(given),
            None => return refuse_invalid("attempt must be a number"),
        },
    };
    check_attempt(container, attempt)?;
    if let Some(status) = patch.get("runtime_status") {
        check_runtime_status(status)?;
    }
    if let QueueCaller::Inside { container: uuid, attempt } = who {
        return if *uuid != container.uuid || *attempt != container.attempt {
            Err(QueueRefusal::Denied("the token belongs to another container or attempt".to_owned()))
        } else if container.state != Status::Running {
            refuse_invalid(format!("the container is {}, not Running", container.state))
        } else {
            apply_patch(container, &patch, &PROGRAM_ATTRIBUTES)
        };
    }
    let Some(actor) = who.actor(container) else {
        return Err(QueueRefusal::Denied(
            "only the dispatcher or executor of a container may change it".to_owned(),
        ));
    };
    let state = patch.remove("state");
    match state {
        None => update_attributes(container, actor, &patch),
        Some(state) => {
            let wanted = state.as_str().and_then(|word| word.parse::<Status>().ok());
            let Some(wanted) = wanted else {
                return refuse_invalid(format!("{state} is not a container state"));
            };
            change_state(container, actor, wanted, &patch, now)
        }
    }
}

fn check_runtime_status(status: &Value) -> Result<(), QueueRefusal> {
    let Some(status) = status.as_object() else { return refuse_invalid("runtime_status must be an object") };
    let texts =
        ["error", "errorDetail", "warning", "warningDetail", "activity", "preemptionNotice", "reason"];
    match texts.iter().find(|name| status.get(**name).is_some_and(|value| !value.is_string())) {
        Some(name) => refuse_invalid(format!("runtime_status.{name} must be a string")),
        None => Ok(()),
    }
}

/// Writes attributes without a change of state.
fn update_attributes(
    container: &Container,
    actor: ContainerActor,
    patch: &Map<String, Value>,
) -> Result<Container, QueueRefusal> {
    let mut allowed: Vec<&str> = Vec::new();
    match actor {
        ContainerActor::Admin => match container.state {
            Status::Queued => allowed.push("priority"),
            Status::Complete => allowed.push("reusable"),
            Status::Locked | Status::Running | Status::Cancelled => {}
        },
        ContainerActor::Holder | ContainerActor::Executor => match container.state {
            Status::Locked => allowed.extend(["runtime_status", "log"]),
            Status::Running => {
                allowed.push("runtime_status");
                allowed.extend(RESULT_ATTRIBUTES);
            }
            Status::Queued | Status::Complete | Status::Cancelled => {}
        },
        ContainerActor::Dispatcher | ContainerActor::Server => {}
    }
    if allowed.is_empty() {
        return Err(QueueRefusal::Denied(format!(
            "{actor} may not change a container that is {}",
            container.state
        )));
    }
    let mut next = apply_patch(container, patch, &allowed)?;
    // A report of the next attempt does not hide why the last one failed.
    if let (Status::Locked, Some(warning)) = (container.state, container.runtime_status.get("warning")) {
        next.runtime_status.entry("warning").or_insert_with(|| warning.clone());
    }
    Ok(next)
}

fn change_state(
    container: &Container,
    actor: ContainerActor,
    wanted: Status,
    patch: &Map<String, Value>,
    now: Timestamp,
) -> Result<Container, QueueRefusal> {
    let event = match wanted {
        Status::Queued => Event::Unlock,
        Status::Locked => return refuse_invalid("use `lock` to lock a container"),
        Status::Running => Event::Start,
        Status::Complete => Event::Complete,
        Status::Cancelled => Event::Cancel,
    };
    let state = check_transition(container, actor, event)?;
    let mut allowed = vec!["runtime_status", "log"];
    if wanted != Status::Queued {
        allowed.extend(RESULT_ATTRIBUTES);
    }
    let mut next = apply_patch(container, patch, &allowed)?;
    next.state = state;
    match state {
        Status::Queued => {
            (next.locked_by_uuid, next.auth_uuid) = (None, None);
            // The reason why the host could not run it is what it waits for.
            let why = next.runtime_status.get("error").and_then(Value::as_str).map(str::to_owned);
            let why = why.filter(|_| patch.contains_key("runtime_status"));
            next.runtime_status = initial_status(&container.work);
            if let Some(why) = &why {
                // Kept while the next attempt prepares.
                add_warning(&mut next, &format!("attempt {} failed: {why}", container.attempt));
            }
            next.scheduling_status = why.clone().unwrap_or_default();
            if container.lock_count >= LOCKS_MAX {
                next.state = Status::Cancelled;
                next.finished_at = Some(now);
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                set_reason(
                    &mut next,
                    "attempts",
                    &format!("returned to the queue {} times{why}", container.lock_count),
                );
            }
        }
        Status::Running => {
            next.started_at = Some(now);
            // Clears what it waited for before, and why earlier attempts failed.
            if !patch.contains_key("runtime_status") {
                next.runtime_status = initial_status(&container.work);
            }
        }
        Status::Complete if next.exit_code.is_none() => {
            return refuse_invalid("a container that is Complete requires an exit_code");
        }
        Status::Complete | Status::Cancelled => {
            next.finished_at = Some(now);
            next.auth_uuid = None;
            if container.priority == 0 && state == Status::Cancelled {
                next.runtime_status.entry("reason").or_insert_with(|| "priority_zero".into());
            }
        }
        Status::Locked => {}
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::ContainerSpec, *};

    const NOW: Timestamp = Timestamp(7);

    fn dispatcher() -> QueueCaller {
        QueueCaller::Dispatcher { token: "d".into() }
    }

    fn queued() -> Container {
        let fresh = Container::new("c".into(), ContainerSpec::default(), "u", Timestamp(1));
        Container { priority: 5, ..fresh }
    }

    fn locked() -> Container {
        lock(&queued(), &dispatcher(), "a").unwrap()
    }

    fn write(container: &Container, who: &QueueCaller, patch: Value) -> Result<Container, QueueRefusal> {
        update(container, who, patch.as_object().unwrap(), NOW)
    }

    fn running() -> Container {
        write(&locked(), &dispatcher(), json!({ "state": "Running", "attempt": 1 })).unwrap()
    }

    #[test]
    fn a_lock_increments_the_attempt_and_a_second_lock_names_the_holder() {
        let held = locked();
        assert_eq!((held.state, held.attempt, held.lock_count), (Status::Locked, 1, 1));
        let second = lock(&held, &QueueCaller::Dispatcher { token: "e".into() }, "b").unwrap_err();
        assert_eq!(
            second,
            QueueRefusal::Invalid("cannot lock: the container is Locked by d (attempt 1)".into())
        );
        assert!(matches!(lock(&queued(), &QueueCaller::Admin, "b"), Err(QueueRefusal::Denied(_))));
    }

    #[test]
    fn activity_of_a_locked_container_is_shown_until_it_runs() {
        let waits = json!({ "runtime_status": { "activity": "waits in the scheduler: Resources" } });
        let waiting = write(&locked(), &dispatcher(), waits).unwrap();
        assert_eq!(waiting.runtime_status["activity"], "waits in the scheduler: Resources");
        let runs = write(&waiting, &dispatcher(), json!({ "state": "Running" })).unwrap();
        assert_eq!(runs.runtime_status.get("activity"), None);
    }

    #[test]
    fn r13_a_container_with_priority_zero_cannot_be_locked() {
        let unwanted = Container { priority: 0, ..queued() };
        assert!(matches!(lock(&unwanted, &dispatcher(), "a"), Err(QueueRefusal::Invalid(_))));
    }

    #[test]
    fn r14_the_tenth_unlock_after_a_failure_cancels_the_container() {
        let worn = Container { lock_count: LOCKS_MAX, ..locked() };
        let spent = unlock(&worn, &dispatcher(), Some(1), false, NOW).unwrap();
        assert_eq!((spent.state, spent.finished_at), (Status::Cancelled, Some(NOW)));
        assert_eq!(spent.runtime_status["reason"], "attempts");
        let kept = unlock(&worn, &dispatcher(), None, true, NOW).unwrap();
        assert_eq!((kept.state, kept.lock_count, kept.attempt), (Status::Queued, LOCKS_MAX - 1, 1));
    }

    #[test]
    fn unlock_error_is_shown_while_a_container_is_queued_and_after_it_is_cancelled() {
        let why = json!({ "state": "Queued", "runtime_status": { "error": "no engine answers" } });
        let waits = write(&locked(), &dispatcher(), why.clone()).unwrap();
        assert_eq!((waits.state, waits.scheduling_status.as_str()), (Status::Queued, "no engine answers"));
        assert_eq!(waits.runtime_status.get("error"), None);
        // The next attempt shows it until its program runs.
        let again = lock(&waits, &dispatcher(), "b").unwrap();
        assert_eq!(attempt_error(&again), Some("attempt 1 failed: no engine answers"));
        assert_eq!(again.runtime_status["warning"], "attempt 1 failed: no engine answers");
        let activity = json!({ "runtime_status": { "activity": "waits in the scheduler" } });
        let again = write(&again, &dispatcher(), activity).unwrap();
        assert_eq!(attempt_error(&again), Some("attempt 1 failed: no engine answers"));
        let runs = write(&again, &dispatcher(), json!({ "state": "Running" })).unwrap();
        assert_eq!((attempt_error(&runs), runs.runtime_status.get("warning")), (None, None));
        let worn = Container { lock_count: LOCKS_MAX, ..locked() };
        let spent = write(&worn, &dispatcher(), why).unwrap();
        assert_eq!(spent.state, Status::Cancelled);
        let text = format!("returned to the queue {LOCKS_MAX} times: no engine answers");
        assert_eq!(spent.runtime_status["error"], text);
        let silent = write(&locked(), &dispatcher(), json!({ "state": "Queued" })).unwrap();
        assert_eq!(silent.scheduling_status, "");
    }

    #[test]
    fn c1_only_the_holder_the_current_executor_or_an_admin_cancel_writes_a_held_container() {
        let other = QueueCaller::Dispatcher { token: "e".into() };
        let old = QueueCaller::Executor { container: "c".into(), attempt: 0 };
        let own = QueueCaller::Executor { container: "c".into(), attempt: 1 };
        for (who, is_allowed) in
            [(&other, false), (&old, false), (&QueueCaller::User, false), (&own, true), (&dispatcher(), true)]
        {
            let written = write(&locked(), who, json!({ "state": "Running" }));
            assert_eq!(written.is_ok(), is_allowed, "{who:?}");
            assert_eq!(unlock(&locked(), who, None, false, NOW).is_ok(), is_allowed, "{who:?}");
        }
        let cancelled = write(&running(), &QueueCaller::Admin, json!({ "state": "Cancelled" })).unwrap();
        assert_eq!(cancelled.state, Status::Cancelled);
        assert!(write(&running(), &QueueCaller::Admin, json!({ "progress": 1.0 })).is_err());
    }

    #[test]
    fn c2_a_repeated_or_skipped_state_and_a_foreign_attempt_are_refused() {
        let no = |container: &Container, patch: Value| {
            assert!(
                matches!(write(container, &dispatcher(), patch.clone()), Err(QueueRefusal::Invalid(_))),
                "{patch}"
            );
        };
        no(&running(), json!({ "state": "Running" }));
        no(&locked(), json!({ "state": "Complete", "exit_code": 0 }));
        no(&locked(), json!({ "state": "Running", "attempt": 2 }));
        no(&running(), json!({ "state": "Complete" }));
        no(&running(), json!({ "state": "Odd" }));
        let done = write(&running(), &dispatcher(), json!({ "state": "Complete", "exit_code": 3 })).unwrap();
        assert_eq!((done.exit_code, done.finished_at, done.started_at), (Some(3), Some(NOW), Some(NOW)));
        no(&done, json!({ "state": "Cancelled" }));
    }

    #[test]
    fn a_program_inside_a_container_may_write_progress_but_not_state() {
        let inside = QueueCaller::Inside { container: "c".into(), attempt: 1 };
        assert_eq!(write(&running(), &inside, json!({ "progress": 0.5 })).unwrap().progress, 0.5);
        assert!(write(&running(), &inside, json!({ "state": "Complete", "exit_code": 0 })).is_err());
        assert!(write(&locked(), &inside, json!({ "progress": 0.5 })).is_err());
        let odd = write(&running(), &inside, json!({ "runtime_status": { "error": 3 } }));
        assert_eq!(odd, Err(QueueRefusal::Invalid("runtime_status.error must be a string".into())));
    }
}
