//! Phase of a job: a file that the job writes, and that the runner reads once, when the job has failed.
//!
//! Only a job whose variables request the file has one. Its contents affect only that job.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::OpenOptions,
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::OFlags;
use windlass_model::skypilot::{GATE_FILE, PHASE_FILE, PRIVATE_HOME, Phase};

use super::env::Env;

/// Size in bytes that is read: enough for a phase and a newline.
const BYTES_MAX: u64 = 64;

/// Private home directory of a job, below its working directory.
pub(super) const PRIVATE_HOME_DIR: &str = ".home";

/// Returns whether a job requests a private home directory where it would share that of its user.
pub(super) fn wants_private_home(env: &BTreeMap<String, String>, scratch: Option<&Path>) -> bool {
    scratch.is_some() && env.contains_key(PRIVATE_HOME)
}

/// Sets the variables for what a job requested by naming them. `scratch` is the task's directory, outside of
/// containers; there the job would otherwise share the home directory of its user.
pub(super) fn set_phase_file(env: &mut Env, scratch: Option<&Path>, submission: &str) -> Option<PathBuf> {
    if scratch.is_some()
        && let Some(requested) = env.get_mut(OsStr::new(PRIVATE_HOME))
    {
        *requested = "1".into();
    }
    let requested = env.get_mut(OsStr::new(PHASE_FILE))?;
    let path = match scratch {
        Some(scratch) => scratch.join(".windlass-phase"),
        None => Path::new("/tmp").join(format!(".windlass-phase-{submission}")),
    };
    *requested = path.clone().into();
    Some(path)
}

/// Returns the file for which the job waits before it continues, if it requests one: its nodes start together.
pub(super) fn set_gate_file(env: &mut Env, scratch: Option<&Path>, submission: &str) -> Option<PathBuf> {
    let requested = env.get_mut(OsStr::new(GATE_FILE))?;
    let path = match scratch {
        Some(scratch) => scratch.join(".windlass-gate"),
        None => Path::new("/tmp").join(format!(".windlass-gate-{submission}")),
    };
    *requested = path.clone().into();
    Some(path)
}

/// Variable with the path of the file that is written when the scheduler ends the job.
pub(super) const PREEMPTION_FILE: &str = "WINDLASS_PREEMPTION_FILE";

/// Sets the variable of the file that is written if the scheduler ends the job.
pub(super) fn set_preemption_file(env: &mut Env, scratch: Option<&Path>, submission: &str) -> PathBuf {
    let path = match scratch {
        Some(scratch) => scratch.join(".windlass-preemption"),
        None => Path::new("/tmp").join(format!(".windlass-preemption-{submission}")),
    };
    env.insert(PREEMPTION_FILE.into(), path.clone().into());
    path
}

/// Writes that the scheduler ends the job, and the seconds that it has. A file that the job created itself is left as
/// it is.
pub(super) fn write_preemption_notice(file: &Path, grace: Option<Duration>) -> io::Result<()> {
    let notice = match grace {
        Some(grace) => {
            format!("{{\"reason\": \"preempted_by_scheduler\", \"grace_seconds\": {}}}\n", grace.as_secs())
        }
        None => "{\"reason\": \"preempted_by_scheduler\"}\n".to_owned(),
    };
    match OpenOptions::new().write(true).create_new(true).mode(0o644).open(file) {
        Ok(mut file) => file.write_all(notice.as_bytes()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens a gate. A gate that is open stays open, whatever file has its name.
pub(super) fn open_gate(gate: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).open(gate) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Returns whether the job failed during its setup. False if the file cannot be read.
pub(super) fn is_in_setup(path: &Path) -> bool {
    is_in_phase(path, Phase::Setup)
}

/// Returns whether the job reports exactly this phase.
pub(super) fn is_in_phase(path: &Path, phase: Phase) -> bool {
    // Neither a pipe nor a link with that name may block the runner.
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits();
    let opened = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path);
    let mut text = String::new();
    match opened.and_then(|file| file.take(BYTES_MAX).read_to_string(&mut text)) {
        Ok(_) => text.trim() == phase.as_str(),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, path::Path, time::Duration};

    use windlass_model::skypilot::Phase;

    use super::{
        Env, is_in_phase, is_in_setup, open_gate, set_gate_file, set_phase_file, set_preemption_file,
        write_preemption_notice,
    };

    #[test]
    fn only_a_job_that_requests_them_gets_a_phase_file_and_a_private_home() {
        let mut env = Env::from([("A".into(), "1".into())]);
        assert_eq!(set_phase_file(&mut env, Some(Path::new("/s")), "id"), None);
        assert_eq!(env.len(), 1);
        env.extend([("WINDLASS_PHASE_FILE".into(), "".into()), ("WINDLASS_PRIVATE_HOME".into(), "".into())]);
        let (mut inside, mut outside) = (env.clone(), env);
        assert_eq!(
            set_phase_file(&mut outside, Some(Path::new("/s")), "id").as_deref(),
            Some(Path::new("/s/.windlass-phase"))
        );
        assert_eq!(outside[std::ffi::OsStr::new("WINDLASS_PRIVATE_HOME")], "1");
        assert_eq!(
            set_phase_file(&mut inside, None, "id").as_deref(),
            Some(Path::new("/tmp/.windlass-phase-id"))
        );
        assert_eq!(inside[std::ffi::OsStr::new("WINDLASS_PRIVATE_HOME")], "");
    }

    #[test]
    fn a_gate_file_is_set_only_on_request_and_opening_it_twice_is_harmless() {
        let dir = std::env::temp_dir().join(format!("windlass-gate-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut env = Env::from([("A".into(), "1".into())]);
        assert_eq!(set_gate_file(&mut env, Some(&dir), "id"), None);
        env.insert("WINDLASS_GATE_FILE".into(), "".into());
        let path = set_gate_file(&mut env, Some(&dir), "id").unwrap();
        assert_eq!(env[std::ffi::OsStr::new("WINDLASS_GATE_FILE")], path.as_os_str());
        open_gate(&path).unwrap();
        open_gate(&path).unwrap();
        assert!(path.is_file());
        std::fs::write(dir.join("phase"), "ready\n").unwrap();
        assert!(is_in_phase(&dir.join("phase"), Phase::Ready) && !is_in_setup(&dir.join("phase")));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_preempted_job_finds_a_notice_with_its_grace_period_and_no_file_is_replaced() {
        let dir = std::env::temp_dir().join(format!("windlass-preemption-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut env = Env::new();
        let file = set_preemption_file(&mut env, Some(&dir), "id");
        assert_eq!(env[OsStr::new("WINDLASS_PREEMPTION_FILE")], file.as_os_str());
        write_preemption_notice(&file, Some(Duration::from_secs(60))).unwrap();
        let notice: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(notice, serde_json::json!({"reason": "preempted_by_scheduler", "grace_seconds": 60}));
        write_preemption_notice(&file, None).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().contains("60"));
        std::fs::remove_file(&file).unwrap();
        std::fs::write(dir.join("own"), "mine").unwrap();
        std::os::unix::fs::symlink(dir.join("own"), &file).unwrap();
        write_preemption_notice(&file, None).unwrap();
        assert_eq!(std::fs::read_to_string(dir.join("own")).unwrap(), "mine");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn only_a_regular_file_that_contains_setup_means_the_setup_phase() {
        let dir = std::env::temp_dir().join(format!("windlass-phase-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("phase");
        assert!(!is_in_setup(&file));
        std::fs::write(&file, "setup\n").unwrap();
        assert!(is_in_setup(&file));
        std::os::unix::fs::symlink(&file, dir.join("link")).unwrap();
        assert!(!is_in_setup(&dir.join("link")));
        std::fs::write(&file, "run\n").unwrap();
        assert!(!is_in_setup(&file));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
