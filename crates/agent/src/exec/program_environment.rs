//! Environment variables of a container's program, and of the command-line program of its engine.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use windlass_model::queue::REFUSED_REASON;

use super::{
    AttemptError,
    guard::ENVIRONMENT_FILE,
    image::Engine,
    program::{ProgramSpec, private_file_options},
};

/// Variables of the executor's environment that are passed to the command-line programs of engines.
pub(super) const ENGINE_VARIABLES: [&str; 5] = ["PATH", "HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR", "TMPDIR"];

/// Prefixes of variables that configure the programs of engines and the libraries they use. Variables of a container
/// must not affect them.
const ENGINE_VARIABLE_PREFIXES: [&str; 12] = [
    "BUILDAH_",
    "CONTAINER",
    "DOCKER_",
    "GCONV_",
    "GLIBC_",
    "GO",
    "LD_",
    "MALLOC_",
    "PODMAN_",
    "REGISTRY_",
    "STORAGE_",
    "XDG_",
];

/// Variables that select the GPUs of a program.
pub(super) const GPU_VARIABLES: [&str; 5] = [
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "GPU_DEVICE_ORDINAL",
];
/// Prefix of the variables that Slurm sets for jobs.
const SLURM_PREFIX: &str = "SLURM_";
/// Variables of Slurm that are for clients of the cluster and not for programs.
const SLURM_VARIABLES_HIDDEN: [&str; 2] = ["SLURM_JWT", "SLURM_CONF"];

pub(super) fn is_multiline(value: &str) -> bool {
    value.contains(['\n', '\r'])
}

/// Returns how a container's variables are passed to Docker: a file, and the names of those with several lines. Nothing
/// for Apptainer, which uses a prefix.
pub(super) fn engine_variables<'a>(
    engine: Engine,
    variables: &'a [(String, String)],
    root: &Path,
) -> Result<(Option<PathBuf>, Vec<&'a str>), AttemptError> {
    if !matches!(engine, Engine::Docker(_)) {
        return Ok((None, Vec::new()));
    }
    let (long, short): (Vec<_>, Vec<_>) = variables.iter().partition(|(_, value)| is_multiline(value));
    let is_odd =
        |name: &str| name.is_empty() || name.contains(|c: char| c.is_whitespace() || "=#".contains(c));
    let is_engines = |name: &str| {
        ENGINE_VARIABLES.contains(&name)
            || ENGINE_VARIABLE_PREFIXES.iter().any(|start| name.starts_with(start))
    };
    let odd =
        variables.iter().find(|(name, value)| is_odd(name) || (is_multiline(value) && is_engines(name)));
    if let Some((name, _)) = odd {
        let why = format!("environment variable `{}` cannot be passed to a container", name.escape_debug());
        return Err(AttemptError::CannotRun { reason: REFUSED_REASON, why });
    }
    let path = root.join(ENVIRONMENT_FILE);
    let lines: String = short.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let written = private_file_options().open(&path).and_then(|mut file| file.write_all(lines.as_bytes()));
    written.map_err(AttemptError::Host)?;
    Ok((Some(path), long.iter().map(|(name, _)| name.as_str()).collect()))
}

/// Returns the variables for the API, if the container requests it, followed by those of Slurm, of GPUs and of the
/// container.
pub(super) fn environment(given: &ProgramSpec<'_>, host: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    if given.record["runtime_constraints"]["API"] == true {
        all.push(("ARVADOS_API_HOST".to_owned(), host.to_owned()));
        all.push(("ARVADOS_API_TOKEN".to_owned(), given.token.to_owned()));
        // The client always uses TLS, and would reject a certificate that it does not know.
        all.extend(given.is_unknown.then(|| ("ARVADOS_API_HOST_INSECURE".to_owned(), "1".to_owned())));
    }
    let of_slurm =
        |name: &String| name.starts_with(SLURM_PREFIX) && !SLURM_VARIABLES_HIDDEN.contains(&name.as_str());
    // Variables that are not UTF-8 are left out.
    let texts = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    all.extend(texts.filter(|(name, _)| of_slurm(name)));
    // GPUs that the parent process assigned to this executor.
    all.extend(GPU_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?))));
    let own = given.record["environment"].as_object().into_iter().flatten();
    all.extend(own.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))));
    all
}

#[cfg(test)]
mod tests {
    use windlass_testkit::temp_dir;

    use super::*;

    fn variables(all: &[(&str, &str)]) -> Vec<(String, String)> {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn container_variables_cannot_affect_the_engine_process() {
        let dir = temp_dir("variables").unwrap();
        let docker = Engine::Docker("docker");
        let requested =
            variables(&[("LD_PRELOAD", "/out/x.so"), ("DOCKER_HOST", "tcp://a"), ("KEY", "a\nb")]);
        let (file, names) = engine_variables(docker, &requested, dir.path()).unwrap();
        assert_eq!(names, ["KEY"], "only what has several lines is in its environment");
        let text = std::fs::read_to_string(file.unwrap()).unwrap();
        assert_eq!(text, "LD_PRELOAD=/out/x.so\nDOCKER_HOST=tcp://a\n");
        for odd in
            [("LD_PRELOAD", "/a\n/b"), ("PATH", "a\nb"), ("#A", "b"), ("A B", "c"), ("", "x"), ("A=B", "c")]
        {
            assert!(engine_variables(docker, &variables(&[odd]), dir.path()).is_err(), "{odd:?}");
        }
        let apptainer = engine_variables(Engine::Apptainer("apptainer"), &requested, dir.path()).unwrap();
        assert_eq!(apptainer, (None, Vec::new()));
    }
}
