//! Properties common to tasks, services and dev environments.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table, words},
    decode::{Ctx, Decode, Int, excerpt, text},
    env::Env,
    error::{Code, Diagnosis},
    mounts::{FileMapping, Mount, Repo},
    name::{Name, PythonVersion, User},
    yaml::Node,
};
use crate::{plan::execution_mode::PLAIN_PROCESS_IMAGE, resources::ResourcesSpec};

/// Home directory of the usual user of images: clients send it, and it is not passed to jobs.
pub(crate) const HOME_DIR: &str = "/root";

table! {
    /// Credentials for an image registry.
    pub struct RegistryAuth {
        pub username: String,
        pub password: String,
    }
}

/// A shell: `sh`, `bash` or an absolute path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Shell(pub String);

impl Shell {
    /// Returns the path inside the container.
    pub fn path(&self) -> String {
        match self.0.as_str() {
            "sh" => "/bin/sh".to_owned(),
            "bash" => "/bin/bash".to_owned(),
            path => path.to_owned(),
        }
    }
}

impl Decode for Shell {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let word = text(node, cx)?;
        if matches!(word, "sh" | "bash") || word.starts_with('/') {
            return Some(Self(word.to_owned()));
        }
        cx.invalid(node, format!("`{}` is not `sh`, `bash` or an absolute path", excerpt(word)))
    }
}

/// An absolute path inside the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct AbsolutePath(pub String);

impl Decode for AbsolutePath {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        let path = text(node, cx)?;
        // Older clients send the default of older servers, which is relative.
        if path.starts_with('/') || (!cx.is_strict() && path == ".") {
            return Some(Self(path.to_owned()));
        }
        cx.invalid(node, format!("`{}` is not an absolute path", excerpt(path)))
    }
}

words! {
    /// Class of a run in the queue.
    pub enum RunClass {
        Idle = "idle",
        Normal = "normal",
        Urgent = "urgent",
    }
}

table! {
    /// Properties of every run.
    pub struct Run {
        /// Name of the run. Generated if absent.
        pub name: Option<Name> = None,
        /// Image of the container. `none`, or no image, means a plain process on instances that allow it; on others the
        /// server's default image is used.
        pub image: Option<String> = None,
        /// User inside the container, `user[:group]`. Default: the image's user.
        pub user: Option<User> = None,
        /// Grants full access to the host's devices.
        pub privileged: bool = false,
        /// Replaces the entry point of the image; commands become its arguments.
        pub entrypoint: Option<String> = None,
        /// Directory that commands run in. Default: the image's working directory.
        pub working_dir: Option<AbsolutePath> = None,
        /// Credentials for the image registry.
        pub registry_auth: Option<RegistryAuth> = None,
        /// Version of Python to prepare, with `uv` or the host's `pythonX.Y`; not together with an image.
        pub python: Option<PythonVersion> = None,
        /// Uses the server's image with the CUDA compiler (`windlass server --nvcc-image`).
        pub nvcc: Option<bool> = None,
        /// Uses the server's image with Docker inside (`windlass server --docker-image`).
        pub docker: Option<bool> = None,
        /// Clones only the current branch of the repository.
        pub single_branch: Option<bool> = None,
        /// Environment variables.
        pub env: Env = Env::default(),
        /// Shell for the commands: `sh`, `bash` or an absolute path.
        pub shell: Option<Shell> = None,
        /// Resources that each job requests.
        pub resources: ResourcesSpec = ResourcesSpec::default(),
        /// Class: `urgent` runs are scheduled before `normal` ones, whatever their priority or project, and `idle` ones
        /// last. Default: `normal`.
        pub class: Option<RunClass> = None,
        /// Priority from 0 to 100; of the runs of a project and class, those with a higher priority are scheduled first.
        pub priority: Option<Int<0, 100>> = None,
        /// Whether the scheduler may end the run's jobs so that others can start, on fleets with `preemption`. Default:
        /// `true` in class `idle` and for tasks that are retried after an interruption. What a project holds beyond its
        /// share can be reclaimed from those even if this is `false`.
        pub preemptible: Option<bool> = None,
        /// Volumes and host directories to mount.
        pub volumes: Vec<Mount> = vec![],
        /// Git repository to clone; at most one.
        pub repos: Vec<Repo> = vec![],
        /// Local files and directories to copy.
        pub files: Vec<FileMapping> = vec![],
        /// Not supported: `true` is rejected when the run is applied.
        pub dstack: bool = false,
        /// Deprecated. Has no effect; a value other than the default produces a warning.
        pub home_dir: String = HOME_DIR.to_owned(),
        /// Deprecated: commands before `init` of a dev environment.
        pub setup: Vec<String> = vec![],
    }
    check = Self::check;
    title = "RunProperties";
}

impl Run {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        check_image_choice(self.image.as_deref(), self.python.is_some(), self.nvcc, self.docker, node, cx);
        if self.repos.len() > 1 {
            cx.conflict(node, "repos", "at most one repository can be cloned");
        }
        let elsewhere = node.entry("type").is_some_and(|kind| !is_dev_environment(&kind.value));
        if elsewhere && !self.setup.is_empty() {
            cx.conflict(node, "setup", "`setup` is allowed only in dev environments; use `commands`");
        }
        if self.preemptible == Some(true)
            && node.entry("type").is_some_and(|kind| is_dev_environment(&kind.value))
        {
            cx.conflict(node, "preemptible", "dev environments are never preempted");
        }
        let mut paths: Vec<&str> = self.volumes.iter().map(Mount::path).collect();
        paths.sort_unstable();
        if let Some(twice) = paths.windows(2).find(|pair| pair[0] == pair[1]) {
            cx.conflict(node, "volumes", format!("two volumes are mounted at `{}`", twice[0]));
        }
    }
}

fn is_dev_environment(node: &Node) -> bool {
    super::decode::scalar(node).is_some_and(|scalar| scalar.text == "dev-environment")
}

/// Checks that `image`, `docker` and the parts of the default image are not combined.
pub(crate) fn check_image_choice(
    image: Option<&str>,
    python: bool,
    nvcc: Option<bool>,
    docker: Option<bool>,
    node: &Node,
    cx: &mut Ctx,
) {
    let (nvcc, docker) = (nvcc == Some(true), docker == Some(true));
    // A plain process may use a prepared Python.
    let python_inside = python && image.is_some_and(|image| image != PLAIN_PROCESS_IMAGE);
    let image = image.is_some();
    let pairs = [
        (python_inside, "python", "image"),
        (image && nvcc, "nvcc", "image"),
        (image && docker, "docker", "image"),
        (docker && python, "python", "docker"),
        (docker && nvcc, "nvcc", "docker"),
    ];
    for (clash, key, other) in pairs {
        if clash {
            cx.conflict(node, key, format!("`{key}` and `{other}` are mutually exclusive"));
        }
    }
}

/// Checks that a task or service has commands or an image.
pub(crate) fn check_something_to_run(commands: bool, run: &Run, node: &Node, cx: &mut Ctx) {
    if !commands && run.image.is_none() {
        let message = "either `commands` or `image` is required";
        cx.problem(Diagnosis::new(Code::MissingField, node.span, message).at("commands"));
    }
}

deserialize_by_decoding!(Shell, AbsolutePath);

schema_literal! {
    Shell, "Shell" => _g { "type": "string", "pattern": "^(sh|bash|/.*)$" };
    AbsolutePath, "AbsolutePath" => _g { "type": "string", "pattern": "^/" };
}
