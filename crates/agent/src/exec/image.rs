//! Images: which engine of this machine runs them, and how each is told.
//!
//! Engines are told by their own programs, which are the same for all users of a machine and know where their
//! engine is. A container without an image is a plain process. One with an image is refused where no engine is, unless
//! whoever runs the executor said `--runtime process`.

use std::{path::PathBuf, process::Stdio};

use serde_json::{Value, json};
use tokio::process::Command;

use super::Stopped;

/// Images that mean none.
const NONE: [&str; 2] = ["", "none"];
/// What is kept of an engine's complaint.
const SAID_MAX: usize = 500;

/// What may run containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Runtime {
    /// Docker, Podman or Apptainer, whichever is here; containers with an image are refused where none is
    Auto,
    /// A plain process, also for containers with an image: the image is ignored, and the result is not reused
    Process,
    Docker,
    Podman,
    Apptainer,
}

/// The engine for one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// Docker, or what understands the same words.
    Docker(&'static str),
    Apptainer(&'static str),
}

/// What a container in an image is to be.
pub(super) struct Order<'a> {
    /// Unique on this machine, and findable by those who clean up.
    pub(super) name: &'a str,
    pub(super) image: &'a str,
    pub(super) command: &'a [String],
    pub(super) cwd: &'a str,
    /// Directories and files here, and where they are seen inside.
    pub(super) binds: Vec<(PathBuf, String)>,
    /// Names only: values are in the engine's environment, where no other user sees them.
    pub(super) names: Vec<&'a str>,
    pub(super) memory: Option<u64>,
    pub(super) cpus: Option<u64>,
    /// Numbers of those that are its own.
    pub(super) gpus: Option<String>,
}

/// `Ok(None)`: a plain process. With a warning where the image was ignored.
pub(super) async fn choose(
    runtime: Runtime,
    image: &str,
) -> Result<(Option<Engine>, Option<String>), Stopped> {
    if NONE.contains(&image) {
        return Ok((None, None));
    }
    let candidates: &[Engine] = match runtime {
        Runtime::Process => return Ok((None, Some(format!("image `{image}` was ignored")))),
        Runtime::Auto => &[
            Engine::Docker("docker"),
            Engine::Docker("podman"),
            Engine::Apptainer("apptainer"),
            Engine::Apptainer("singularity"),
        ],
        Runtime::Docker => &[Engine::Docker("docker")],
        Runtime::Podman => &[Engine::Docker("podman")],
        Runtime::Apptainer => &[Engine::Apptainer("apptainer"), Engine::Apptainer("singularity")],
    };
    for engine in candidates {
        if engine.answers().await {
            return Ok((Some(*engine), None));
        }
    }
    if runtime == Runtime::Auto {
        let why = format!(
            "image `{image}` cannot be used: neither Docker nor Podman nor Apptainer answers on this machine"
        );
        return Err(Stopped::Impossible { reason: "image", why });
    }
    let why = format!("{runtime:?} does not answer on this machine");
    Err(Stopped::Machine(std::io::Error::new(std::io::ErrorKind::NotFound, why)))
}

async fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = command.output().await.map_err(|error| format!("start `{program}`: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(said.trim().chars().take(SAID_MAX).collect())
}

impl Engine {
    async fn answers(self) -> bool {
        match self {
            // Only an engine that answers has a server's version.
            Self::Docker(program) => {
                run(program, &["version", "--format", "{{.Server.Version}}"]).await.is_ok()
            }
            Self::Apptainer(program) => run(program, &["--version"]).await.is_ok(),
        }
    }

    /// Before the container is said to run: an image that is not there costs nobody a try.
    pub(super) async fn fetch(self, image: &str) -> Result<(), Stopped> {
        let program = match self {
            Self::Docker(program) => program,
            // It fetches when it starts.
            Self::Apptainer(_) => return Ok(()),
        };
        if run(program, &["image", "inspect", "--format", "{{.Id}}", image]).await.is_ok() {
            return Ok(());
        }
        run(program, &["pull", "--quiet", image]).await.map(drop).map_err(|said| {
            if is_no_image(&said) {
                Stopped::Impossible { reason: "image", why: format!("fetch the image `{image}`: {said}") }
            } else {
                Stopped::Machine(std::io::Error::other(format!("fetch the image `{image}`: {said}")))
            }
        })
    }

    /// The words that run it, and those that remove what is left of it.
    pub(super) fn words(self, order: &Order<'_>) -> (Vec<String>, Vec<String>) {
        match self {
            Self::Docker(program) => (docker(program, order), removal(program, order.name)),
            Self::Apptainer(program) => (apptainer(program, order), Vec::new()),
        }
    }

    /// How it ended, by the engine: whether memory ran out, and whether it was ever started.
    pub(super) async fn verdict(self, name: &str) -> Verdict {
        let program = match self {
            Self::Docker(program) => program,
            Self::Apptainer(_) => return Verdict::default(),
        };
        let format = "{{.State.OOMKilled}}\t{{.State.StartedAt}}\t{{.State.Error}}";
        let said = match run(program, &["inspect", "--format", format, name]).await {
            Ok(said) => said,
            Err(said) => return Verdict { lost: Some(("crashed", said)), ..Verdict::default() },
        };
        let mut parts = said.split('\t');
        let out_of_memory = parts.next() == Some("true");
        let never = parts.next().is_some_and(|at| at.starts_with("0001-"));
        let error = parts.next().unwrap_or_default().to_owned();
        Verdict { out_of_memory, lost: never.then_some(("start_failed", error)) }
    }

    pub(super) async fn remove(self, name: &str) {
        if let Self::Docker(program) = self {
            // Nothing is there to be removed when it never came so far.
            let _ = run(program, &["rm", "--force", "--volumes", name]).await;
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) out_of_memory: bool,
    /// There is no end to tell: it never ran, or the engine does not know it any more. A word, and what was said.
    pub(super) lost: Option<(&'static str, String)>,
}

impl Verdict {
    /// What the last write says of a container that has no end of its own.
    pub(super) fn refusal(&self) -> Option<Value> {
        let (reason, why) = self.lost.as_ref()?;
        let status = json!({ "reason": reason, "error": format!("run the container: {why}") });
        Some(json!({ "state": "Cancelled", "runtime_status": status }))
    }
}

/// The engine answered, and there is no such image: elsewhere there is none either.
fn is_no_image(said: &str) -> bool {
    let said = said.to_ascii_lowercase();
    ["not found", "manifest unknown", "access denied", "does not exist", "invalid reference", "unauthorized"]
        .iter()
        .any(|word| said.contains(word))
}

fn removal(program: &str, name: &str) -> Vec<String> {
    [program, "rm", "--force", "--volumes", name].map(str::to_owned).to_vec()
}

fn docker(program: &str, order: &Order<'_>) -> Vec<String> {
    let mut words =
        [program, "run", "--name", order.name, "--init", "--pull", "never"].map(str::to_owned).to_vec();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    option("--label", format!("windlass.attempt={}", order.name));
    // As a process of the machine has it: the server may be here.
    option("--network", "host".to_owned());
    // Output comes by the pipe alone.
    option("--log-driver", "none".to_owned());
    if let Some(memory) = order.memory {
        option("--memory", format!("{memory}b"));
        option("--memory-swap", format!("{memory}b"));
    }
    if let Some(cpus) = order.cpus {
        option("--cpus", cpus.to_string());
    }
    if let Some(gpus) = &order.gpus {
        // In quotes of its own: a comma would begin another option.
        option("--gpus", format!("\"device={gpus}\""));
    }
    for (from, to) in &order.binds {
        option("--volume", format!("{}:{to}", from.display()));
    }
    for name in &order.names {
        option("--env", (*name).to_owned());
    }
    if !order.cwd.is_empty() {
        option("--workdir", order.cwd.to_owned());
    }
    let (program, rest) = order.command.split_first().map_or(("", order.command), |(one, rest)| (one, rest));
    option("--entrypoint", program.to_owned());
    words.push(order.image.to_owned());
    words.extend(rest.iter().cloned());
    words
}

fn apptainer(program: &str, order: &Order<'_>) -> Vec<String> {
    let mut words = [program, "exec", "--containall", "--no-home"].map(str::to_owned).to_vec();
    if order.gpus.is_some() {
        words.push("--nv".to_owned());
    }
    for (from, to) in &order.binds {
        words.extend(["--bind".to_owned(), format!("{}:{to}", from.display())]);
    }
    if !order.cwd.is_empty() {
        words.extend(["--pwd".to_owned(), order.cwd.to_owned()]);
    }
    // A file of this machine, or an image of a registry.
    let is_file = order.image.starts_with('/') || order.image.contains("://");
    words.push(if is_file { order.image.to_owned() } else { format!("docker://{}", order.image) });
    words.extend(order.command.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order<'a>(command: &'a [String]) -> Order<'a> {
        Order {
            name: "windlass-c.1",
            image: "debian:12",
            command,
            cwd: "/inside",
            binds: vec![(PathBuf::from("/tmp/r/out"), "/out".to_owned())],
            names: vec!["ARVADOS_API_TOKEN"],
            memory: Some(1024),
            cpus: Some(2),
            gpus: Some("0,1".to_owned()),
        }
    }

    #[test]
    fn docker_is_told_everything_and_no_value_of_the_environment() {
        let command = ["sh", "-c", "echo 'a b'"].map(str::to_owned);
        let (words, after) = Engine::Docker("podman").words(&order(&command));
        assert_eq!(
            words.join(" "),
            "podman run --name windlass-c.1 --init --pull never --label windlass.attempt=windlass-c.1 --network \
             host --log-driver none --memory 1024b --memory-swap 1024b --cpus 2 --gpus \"device=0,1\" --volume /tmp/r/out:/out --env \
             ARVADOS_API_TOKEN --workdir /inside --entrypoint sh debian:12 -c echo 'a b'"
        );
        assert_eq!(after.join(" "), "podman rm --force --volumes windlass-c.1");
    }

    #[test]
    fn apptainer_takes_images_of_registries_and_files() {
        let command = ["true".to_owned()];
        let (words, after) = Engine::Apptainer("apptainer").words(&order(&command));
        let want = "apptainer exec --containall --no-home --nv --bind /tmp/r/out:/out --pwd /inside docker://debian:12 true";
        assert_eq!((words.join(" "), after), (want.to_owned(), Vec::new()));
        let file = Order { image: "/images/a.sif", ..order(&command) };
        assert!(Engine::Apptainer("apptainer").words(&file).0.contains(&"/images/a.sif".to_owned()));
    }

    #[test]
    fn an_image_that_does_not_exist_is_told_from_an_engine_that_does_not_work() {
        for said in
            ["Error response from daemon: manifest unknown", "pull access denied for x", "not found: y"]
        {
            assert!(is_no_image(said), "{said}");
        }
        for said in
            ["Cannot connect to the Docker daemon", "dial tcp: i/o timeout", "no space left on device"]
        {
            assert!(!is_no_image(said), "{said}");
        }
    }
}
