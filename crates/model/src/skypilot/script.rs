//! `setup` and `run` as one program for a node.
//!
//! Each is a script for a separate interactive bash: it reads `~/.bashrc` (stock ones return early otherwise), does not
//! stop at the first error, and the exit code is that of the last command. What setup writes to disk, including
//! `~/.bashrc`, is available to run. The text itself runs in a subshell: an interactive shell prints messages about its
//! `exit`, its jobs and its terminal, none of which is the task's output.
//!
//! The program reports its phase: it writes `setup`, `ready` and `run` to the file that the environment names as
//! [`PHASE_FILE`], if there is one, so that a failed setup is distinguished from a failed program whatever its exit
//! code. If there are several nodes, each waits before `run` until the file named by [`GATE_FILE`] exists.

use crate::{config::shell::quote, managed_job::plan::Script, state_machine::words};

/// Maximum size of `setup` or `run`, in bytes: quoted and together they still fit one argument of a program.
pub(super) const SCRIPT_BYTES_MAX: usize = 24 << 10;

/// Variable with the path of the phase file.
pub const PHASE_FILE: &str = "WINDLASS_PHASE_FILE";
/// Variable that is set if the node has no private home directory.
pub const PRIVATE_HOME: &str = "WINDLASS_PRIVATE_HOME";
/// Variable with the path of the file that is created when every node is ready.
pub const GATE_FILE: &str = "WINDLASS_GATE_FILE";

/// Variable with the path of the file that lists the other tasks of a group. `required`: the task must not start
/// without it.
pub const HOSTS_FILE: &str = "WINDLASS_HOSTS_FILE";

words! {
    /// Phase of a node of a task.
    pub enum Phase: "phase of a task" {
        /// preparing
        Setup = "setup",
        /// prepared, waiting for the other nodes
        Ready = "ready",
        /// the program itself
        Run = "run",
    }
}

/// Variables that differ between nodes: the name for the task, and the source of the value.
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

/// If a task has no GPUs, the variable that hides them is unset during setup: some files require that.
const NO_GPUS: &str = r#"[ -n "${CUDA_VISIBLE_DEVICES:-}" ] || unset CUDA_VISIBLE_DEVICES"#;

/// Returns the bash program of one node. `private_home`: the node has no private home directory, so one is created.
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

/// Number of the replica, from 1.
const REPLICA_ID: &str = r#"export SKYPILOT_SERVE_REPLICA_ID="$((${WINDLASS_REPLICA_NUM:-0} + 1))""#;

/// Returns the bash program of one replica of a service.
pub(super) fn service_program(script: &Script, private_home: bool) -> String {
    format!("{REPLICA_ID}\n{}", program(script, 1, private_home))
}

/// Returns a command that runs one script in a separate shell.
fn shell(variables: &[(&str, &str)], text: &str) -> String {
    // Messages of the interactive shell are discarded; the subshell has the task's streams.
    let mut script = "(exec 2>&3 3>&-\n".to_owned();
    for (name, value) in variables {
        script.push_str(&format!("export {name}=\"{value}\"\n"));
    }
    // The text is an argument, so that it is quoted once, and it is evaluated line by line, as a script is: the lines
    // before a syntax error are executed.
    script.push_str("cd ~/sky_workdir\nwindlass_text=$1; shift; eval \"$windlass_text\"\n)");
    // `${{` is a reference in commands: two quotes between its characters change nothing for the shell.
    let text = quote(text).replace("${{", "$''{{");
    format!("/bin/bash -i -c {} /bin/bash {text} 3>&2 2>/dev/null", quote(&script))
}
