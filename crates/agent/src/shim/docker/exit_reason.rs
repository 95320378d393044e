//! Cause of a container's end: the container itself, its engine or its host. Pure.
//!
//! The engine does not record the cause. An engine without live-restore that is stopped first stops its containers; one
//! that was killed kills them when it starts again (exit status 137). After a reboot it assigns 255 to the containers
//! that ran before. So the times decide: an end during the engine's absence, or close to the start of its process, was
//! caused by the engine; one close to the boot of the machine was caused by the machine. With live-restore, containers
//! outlive the engine and every end is their own. Exit status 0 always comes from the job.

use crate::shim::runtime::LossReason;

/// Time after its start in which an engine kills the containers that it found running.
const RESTORE_WINDOW_MS: i64 = 120_000;
/// Maximum time between the end of the last containers and the start of the next engine in an orderly restart.
const RESTART_WINDOW_MS: i64 = 60_000;
/// The same for a reboot of the machine, which takes longer.
const REBOOT_WINDOW_MS: i64 = 600_000;
/// Exit statuses after SIGKILL and SIGTERM.
const KILLED_CODES: [i64; 2] = [137, 143];

/// Facts about the end of a container. Times are milliseconds since 1970 by the host's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContainerEnd {
    pub(super) code: i64,
    pub(super) oom_killed: bool,
    pub(super) started: i64,
    pub(super) finished: i64,
    /// Time of the last response of the engine before it became unreachable, if that happened during the wait.
    pub(super) away: Option<i64>,
    /// Start time of the engine's process, if it can be found.
    pub(super) engine: Option<i64>,
    /// Boot time of the machine.
    pub(super) boot: Option<i64>,
}

pub(super) fn loss_reason(end: ContainerEnd) -> Option<LossReason> {
    if end.code == 0 || end.oom_killed {
        return None;
    }
    let killed = KILLED_CODES.contains(&end.code);
    if let Some(boot) = end.boot.filter(|boot| end.started < *boot) {
        let with_it = end.finished >= boot || (killed && boot - end.finished <= REBOOT_WINDOW_MS);
        return with_it.then_some(LossReason::HostRebooted);
    }
    if end.away.is_some_and(|away| end.finished >= away) {
        return Some(LossReason::EngineRestarted);
    }
    let engine = end.engine.filter(|engine| killed && end.started < *engine)?;
    let next_to = (engine - RESTART_WINDOW_MS..=engine + RESTORE_WINDOW_MS).contains(&end.finished);
    next_to.then_some(LossReason::EngineRestarted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_EXIT: ContainerEnd = ContainerEnd {
        code: 1,
        oom_killed: false,
        started: 1_000_000,
        finished: 2_000_000,
        away: None,
        engine: Some(500_000),
        boot: Some(100_000),
    };

    #[test]
    fn a_container_exit_is_its_own_unless_the_times_show_a_restart_or_reboot() {
        let table = [
            ("failed of itself", OWN_EXIT, None),
            ("killed by somebody", ContainerEnd { code: 137, ..OWN_EXIT }, None),
            (
                "done while the engine was away",
                ContainerEnd { code: 0, away: Some(1_990_000), ..OWN_EXIT },
                None,
            ),
            ("ended before the engine went away", ContainerEnd { away: Some(2_001_000), ..OWN_EXIT }, None),
            (
                "stopped by an engine in order",
                ContainerEnd { code: 143, away: Some(1_999_000), ..OWN_EXIT },
                Some(LossReason::EngineRestarted),
            ),
            (
                "a job that catches the signal",
                ContainerEnd { code: 3, away: Some(1_999_000), ..OWN_EXIT },
                Some(LossReason::EngineRestarted),
            ),
            (
                "killed by a starting engine",
                ContainerEnd { code: 137, engine: Some(1_999_000), ..OWN_EXIT },
                Some(LossReason::EngineRestarted),
            ),
            (
                "stopped with an engine",
                ContainerEnd { code: 137, engine: Some(2_010_000), ..OWN_EXIT },
                Some(LossReason::EngineRestarted),
            ),
            (
                "killed long before the engine's start",
                ContainerEnd { code: 137, engine: Some(2_100_000), ..OWN_EXIT },
                None,
            ),
            ("killed long after it", ContainerEnd { code: 137, engine: Some(1_100_000), ..OWN_EXIT }, None),
            (
                "failed right after the engine's start",
                ContainerEnd { engine: Some(1_999_000), ..OWN_EXIT },
                None,
            ),
            (
                "out of memory",
                ContainerEnd { code: 137, oom_killed: true, engine: Some(1_999_000), ..OWN_EXIT },
                None,
            ),
            (
                "found dead after a power cut",
                ContainerEnd { code: 255, boot: Some(1_900_000), ..OWN_EXIT },
                Some(LossReason::HostRebooted),
            ),
            (
                "stopped by a reboot",
                ContainerEnd { code: 143, boot: Some(2_100_000), ..OWN_EXIT },
                Some(LossReason::HostRebooted),
            ),
            ("failed before a reboot", ContainerEnd { boot: Some(2_100_000), ..OWN_EXIT }, None),
        ];
        for (name, end, expected) in table {
            assert_eq!(loss_reason(end), expected, "{name}");
        }
    }
}
