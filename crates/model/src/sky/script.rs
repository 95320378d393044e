//! `setup` and `run` as one program for a node.
//!
//! Both are scripts for an interactive bash of their own: it reads `~/.bashrc` (stock ones return early
//! otherwise), nothing stops at the first error, and the exit code is that of the last command. What setup writes
//! to disk, `~/.bashrc` included, is there for run. The text itself runs in a subshell of it: an interactive shell
//! announces its `exit`, its jobs and what it thinks of its terminal, and none of that is the task's output.
//!
//! The program says how far it is: it writes `setup`, `ready` and `run` into the file that the environment names
//! as [`PHASE_FILE`], where there is one, so that a failed setup is told apart from a failed program whatever
//! its exit code. Of several nodes each waits before `run` until the file named by [`GATE_FILE`] exists.

use crate::{config::shell::quote, machine::words, managed_job::plan::Script};

/// Longest `setup` or `run`: quoted and together they still fit one argument of a program.
pub(super) const SCRIPT_BYTES_MAX: usize = 24 << 10;

/// The variable with the file that takes the phase.
pub const PHASE_FILE: &str = "WINDLASS_PHASE_FILE";
/// The variable that is set where the node has no home of its own.
pub const PRIVATE_HOME: &str = "WINDLASS_PRIVATE_HOME";
/// The variable with the file that opens when every node is ready.
pub const GATE_FILE: &str = "WINDLASS_GATE_FILE";

/// The variable with the file that names the other tasks of a group. `required`: the task must not begin without.
pub const HOSTS_FILE: &str = "WINDLASS_HOSTS_FILE";

words! {
    /// How far a node of a task has come.
    pub enum Phase: "phase of a task" {
        /// preparing
        Setup = "setup",
        /// prepared, waiting for the other nodes
        Ready = "ready",
        /// the program itself
        Run = "run",
    }
}

/// Variables that differ between nodes: what a task calls them, and where the value comes from.
const RUN_VARIABLES: [(&str, &str); 4] = [
    ("SKYPILOT_NODE_RANK", "${WINDLASS_NODE_RANK:-0}"),
    ("SKYPILOT_NODE_IPS", "${WINDLASS_NODES_IPS:-127.0.0.1}"),
    ("SKYPILOT_NUM_NODES", "${WINDLASS_NODES_NUM:-1}"),
    ("SKYPILOT_NUM_GPUS_PER_NODE", "${WINDLASS_GPUS_PER_NODE:-0}"),
];
const SETUP_VARIABLES: [(&str, &str); 4] = [
    ("SKYPILOT_SETUP_NODE_RANK", "${WINDLASS_NODE_RANK:-0}"),
    ("SKYPILOT_SETUP_NODE_IPS", "${WINDLASS_NODES_IPS:-127.0.0.1}"),
    ("SKYPILOT_NUM_NODES", "${WINDLASS_NODES_NUM:-1}"),
    ("SKYPILOT_SETUP_NUM_GPUS_PER_NODE", "${WINDLASS_GPUS_PER_NODE:-0}"),
];

/// Where a task has no GPUs the variable that hides them is not there while it prepares itself: files ask for that.
const NO_GPUS: &str = r#"[ -n "${CUDA_VISIBLE_DEVICES:-}" ] || unset CUDA_VISIBLE_DEVICES"#;

/// The program of one node, for bash. `private_home`: the node has no home of its own, so one is made.
pub(super) fn program(script: &Script, nodes: u32, private_home: bool) -> String {
    let mut lines: Vec<String> = vec!["export PYTHONUNBUFFERED=1".to_owned()];
    let home = r#"export HOME="${WINDLASS_WORKING_DIR:-$PWD}/.home"; mkdir -p "$HOME""#;
    if private_home {
        lines.push(home.to_owned());
    } else {
        // Only the runner knows whether the node is a container or a process.
        lines.push(format!(r#"if [ -n "${{{PRIVATE_HOME}:-}}" ]; then {home}; fi"#));
    }
    lines.push(
        r#"windlass_dir="${WINDLASS_WORKING_DIR:-$PWD}/sky_workdir"; mkdir -p "$windlass_dir""#.to_owned(),
    );
    lines.push(r#"[ -e ~/sky_workdir ] || ln -sfn "$windlass_dir" ~/sky_workdir"#.to_owned());
    lines.push(format!(
        r#"windlass_phase() {{ [ -z "${PHASE_FILE}" ] || printf '%s\n' "$1" > "${PHASE_FILE}"; }}"#
    ));
    lines.push(format!("windlass_phase {}", Phase::Setup));
    if let Some(setup) = script.setup.as_ref().filter(|setup| !setup.trim().is_empty()) {
        lines.push(shell(&SETUP_VARIABLES, &format!("{NO_GPUS}\n{setup}")));
        lines.push(r#"windlass_code=$?; [ "$windlass_code" -eq 0 ] || exit "$windlass_code""#.to_owned());
    }
    lines.push(format!("windlass_phase {}", Phase::Ready));
    if nodes > 1 {
        lines.push(format!(r#"while [ -n "${GATE_FILE}" ] && [ ! -e "${GATE_FILE}" ]; do sleep 0.2; done"#));
    }
    lines.push(format!("windlass_phase {}", Phase::Run));
    let run = script.run.as_deref().unwrap_or_default();
    lines.push(format!("exec {}", shell(&RUN_VARIABLES, run)));
    lines.join("\n")
}

/// One script in a shell of its own.
fn shell(variables: &[(&str, &str)], text: &str) -> String {
    // What the interactive shell says goes nowhere; the subshell has the task's own streams.
    let mut script = "(exec 2>&3 3>&-\n".to_owned();
    for (name, value) in variables {
        script.push_str(&format!("export {name}=\"{value}\"\n"));
    }
    // The text is an argument, so that it is quoted once, and read line by line, as a script is: what comes before a
    // mistake is done.
    script.push_str("cd ~/sky_workdir\nwindlass_text=$1; shift; eval \"$windlass_text\"\n)");
    format!("/bin/bash -i -c {} /bin/bash {} 3>&2 2>/dev/null", quote(&script), quote(text))
}
