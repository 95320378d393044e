//! Whether a container engine answers on this machine, and where.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

const USUAL: &str = "/var/run/docker.sock";
/// An engine that is well answers in a millisecond.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
const ANSWER_MAX: u64 = 4096;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engine {
    At(PathBuf),
    /// With a clause for people: `no Docker engine at /var/run/docker.sock`.
    None {
        why: String,
    },
}

/// Where engines are looked for: what was named, else `DOCKER_HOST`, else the usual places.
#[derive(Clone, Debug, Default)]
pub struct Places {
    pub named: Option<PathBuf>,
    pub docker_host: Option<String>,
    pub runtime_dir: Option<PathBuf>,
}

impl Places {
    pub fn here(named: Option<PathBuf>) -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            named,
            docker_host: set("DOCKER_HOST").map(|host| host.to_string_lossy().into_owned()),
            runtime_dir: set("XDG_RUNTIME_DIR").map(PathBuf::from),
        }
    }

    fn sockets(&self) -> Result<Vec<PathBuf>, String> {
        if let Some(named) = &self.named {
            return Ok(vec![named.clone()]);
        }
        if let Some(host) = &self.docker_host {
            return match host.strip_prefix("unix://") {
                Some(path) => Ok(vec![path.into()]),
                None => {
                    Err(format!("DOCKER_HOST is {host}, and only unix:// sockets of this machine are used"))
                }
            };
        }
        let own = self.runtime_dir.iter();
        let own = own.flat_map(|dir| [dir.join("docker.sock"), dir.join("podman/podman.sock")]);
        Ok([USUAL, "/run/podman/podman.sock"].map(PathBuf::from).into_iter().chain(own).collect())
    }

    /// Asks each in turn; the first that answers is it.
    pub async fn look(&self) -> Engine {
        let sockets = match self.sockets() {
            Ok(sockets) => sockets,
            Err(why) => return Engine::None { why },
        };
        // What somebody could mend comes before what is not there.
        let (mut absent, mut broken) = (None, None);
        for socket in sockets {
            match ping(&socket).await {
                Ok(()) => return Engine::At(socket),
                Err(Silence::Absent) => {
                    absent.get_or_insert_with(|| format!("no Docker engine at {}", socket.display()));
                }
                Err(Silence::Said(said)) => {
                    let socket = socket.display();
                    broken.get_or_insert_with(|| {
                        format!("the Docker engine at {socket} cannot be used: {said}")
                    });
                }
            }
        }
        Engine::None { why: broken.or(absent).unwrap_or_else(|| "no Docker engine".to_owned()) }
    }
}

enum Silence {
    Absent,
    Said(String),
}

async fn ping(socket: &Path) -> Result<(), Silence> {
    let asked = tokio::time::timeout(ANSWER_WITHIN, async {
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    });
    match asked.await {
        Ok(Ok(answer)) => {
            let head = String::from_utf8_lossy(&answer);
            let first = head.lines().next().unwrap_or_default();
            if first.split_whitespace().nth(1) == Some("200") {
                return Ok(());
            }
            Err(Silence::Said(if first.is_empty() { "it says nothing".into() } else { first.into() }))
        }
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(Silence::Absent),
        Ok(Err(error)) => Err(Silence::Said(error.to_string())),
        Err(_) => Err(Silence::Said(format!("no answer within {} s", ANSWER_WITHIN.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn why(places: Places) -> String {
        match places.look().await {
            Engine::At(at) => panic!("found one at {}", at.display()),
            Engine::None { why } => why,
        }
    }

    #[tokio::test]
    async fn no_engine_says_where_it_was_looked_for() {
        let at = |path: &str| Places { named: Some(path.into()), ..Places::default() };
        assert_eq!(why(at("/nowhere/docker.sock")).await, "no Docker engine at /nowhere/docker.sock");
        let remote = Places { docker_host: Some("tcp://10.0.0.1:2375".into()), ..Places::default() };
        assert!(why(remote).await.contains("tcp://10.0.0.1:2375"));
    }

    #[tokio::test]
    async fn a_socket_that_is_no_engine_is_named_with_what_it_said() {
        let dir = windlass_testkit::temp_dir("engine").unwrap();
        let path = dir.path().join("docker.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let silent = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = [0; 37];
            stream.read_exact(&mut asked).await.unwrap();
            stream.write_all(b"HTTP/1.0 503 Busy\r\n\r\n").await.unwrap();
        });
        let said = why(Places { named: Some(path), ..Places::default() }).await;
        assert!(said.contains("503 Busy"), "{said}");
        silent.await.unwrap();
    }
}
