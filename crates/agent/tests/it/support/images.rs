//! Images for tests, built from files of this host and loaded into an engine as needed. No network.

use std::{collections::BTreeSet, fs, io::Write, path::Path, process::Command};

use axum::body::Bytes;
use bollard::{Docker, body_full, query_parameters::CreateImageOptionsBuilder};
use futures_util::TryStreamExt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// Busybox with all its links, users `root` and `job`, a variable, a working directory and a command.
    Busybox,
    /// Nothing but `/busybox`: no shell at its usual path, no `/etc`, no `/tmp`.
    Bare,
    /// Bash and some tools of this host with the libraries that they need: a real dynamic userland.
    Bash,
}

const BUSYBOX: &str = "/bin/busybox";
/// Programs in `Image::Bash`.
const TOOLS: &[&str] = &[
    "bash", "cat", "chmod", "env", "false", "grep", "head", "id", "ls", "mkdir", "pwd", "rm", "sed", "sleep",
    "stat", "touch", "true",
];

impl Image {
    /// Loads the image into the engine if needed and returns its name.
    pub(crate) async fn ensure(self, engine: &Docker) -> String {
        let tar = self.tar();
        let digest = ring::digest::digest(&ring::digest::SHA256, &tar);
        let tag: String = digest.as_ref().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        let (repository, changes) = match self {
            Self::Busybox => (
                "windlass-test/busybox",
                vec!["ENV FROM_IMAGE=yes", "WORKDIR /opt/app", r#"CMD ["/bin/date", "-u"]"#],
            ),
            Self::Bare => ("windlass-test/bare", vec![r#"ENTRYPOINT ["/busybox"]"#]),
            Self::Bash => ("windlass-test/bash", vec!["ENV PATH=/usr/bin:/bin", "USER job"]),
        };
        let name = format!("{repository}:{tag}");
        if engine.inspect_image(&name).await.is_err() {
            let changes = changes.into_iter().map(str::to_owned).collect();
            // Podman does not accept the tag as a separate argument.
            let options = CreateImageOptionsBuilder::default().from_src("-").repo(&name).changes(changes);
            let made = engine.create_image(Some(options.build()), Some(body_full(Bytes::from(tar))), None);
            made.try_collect::<Vec<_>>().await.unwrap();
        }
        name
    }

    /// Field `config` of the image's configuration, as JSON.
    pub(crate) fn config(self) -> &'static str {
        match self {
            Self::Busybox => {
                r#"{"Env": ["FROM_IMAGE=yes"], "WorkingDir": "/opt/app", "Cmd": ["/bin/date", "-u"]}"#
            }
            Self::Bare => r#"{"Entrypoint": ["/busybox"]}"#,
            Self::Bash => r#"{"Env": ["PATH=/usr/bin:/bin"], "User": "job"}"#,
        }
    }

    pub(crate) fn tar(self) -> Vec<u8> {
        let mut tar = Tar::new();
        match self {
            Self::Busybox => {
                tar.file("bin/busybox", &fs::read(BUSYBOX).unwrap(), 0o755);
                let listed = Command::new(BUSYBOX).arg("--list").output().unwrap().stdout;
                for applet in String::from_utf8(listed).unwrap().lines().filter(|applet| *applet != "busybox")
                {
                    tar.link(&format!("bin/{applet}"), "busybox");
                }
                add_users(&mut tar);
            }
            Self::Bare => tar.file("busybox", &fs::read(BUSYBOX).unwrap(), 0o755),
            Self::Bash => {
                let mut libraries = BTreeSet::new();
                for tool in TOOLS {
                    let path = format!("/usr/bin/{tool}");
                    libraries.extend(linked_libraries(&path));
                    tar.file(&format!("usr/bin/{tool}"), &fs::read(&path).unwrap(), 0o755);
                }
                for library in libraries {
                    tar.file(library.trim_start_matches('/'), &fs::read(&library).unwrap(), 0o755);
                }
                tar.link("bin", "usr/bin");
                tar.link("usr/bin/sh", "bash");
                add_users(&mut tar);
            }
        }
        tar.done()
    }
}

fn add_users(tar: &mut Tar) {
    tar.file("etc/passwd", b"root:x:0:0::/root:/bin/sh\njob:x:1000:1000::/home/job:/bin/sh\n", 0o644);
    tar.file("etc/group", b"root:x:0:\njob:x:1000:\nextra:x:2000:job\n", 0o644);
    tar.dir("tmp", 0o1777);
    tar.dir("root", 0o700);
    tar.dir("home", 0o755);
}

/// Paths of the libraries that a program is linked with.
fn linked_libraries(program: &str) -> Vec<String> {
    let listed = Command::new("ldd").arg(program).output().unwrap().stdout;
    let words = String::from_utf8(listed).unwrap();
    let paths = words.split_whitespace().filter(|word| word.starts_with('/') && Path::new(word).exists());
    paths.map(str::to_owned).collect()
}

/// A reproducible tar archive.
pub(crate) struct Tar(tar::Builder<Vec<u8>>);

impl Tar {
    pub(crate) fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn header(kind: tar::EntryType, size: usize, mode: u32) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(u64::try_from(size).unwrap());
        header.set_mode(mode);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header
    }

    pub(crate) fn file(&mut self, path: &str, content: &[u8], mode: u32) {
        let mut header = Self::header(tar::EntryType::Regular, content.len(), mode);
        self.0.append_data(&mut header, path, content).unwrap();
    }

    /// A file of this user and group.
    pub(crate) fn owned_file(&mut self, path: &str, content: &[u8], (uid, gid): (u64, u64)) {
        let mut header = Self::header(tar::EntryType::Regular, content.len(), 0o644);
        header.set_uid(uid);
        header.set_gid(gid);
        self.0.append_data(&mut header, path, content).unwrap();
    }

    pub(crate) fn dir(&mut self, path: &str, mode: u32) {
        let mut header = Self::header(tar::EntryType::Directory, 0, mode);
        self.0.append_data(&mut header, path, std::io::empty()).unwrap();
    }

    /// A file whose name is written as it is, whatever it contains.
    pub(crate) fn raw_file(&mut self, name: &str, content: &[u8]) {
        let mut header = Self::header(tar::EntryType::Regular, content.len(), 0o644);
        if name.len() <= 100 {
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        } else {
            let long = format!("{name}\0");
            let mut before = Self::header(tar::EntryType::GNULongName, long.len(), 0o644);
            before.set_cksum();
            self.0.append(&before, long.as_bytes()).unwrap();
        }
        header.set_cksum();
        self.0.append(&header, content).unwrap();
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        let mut header = Self::header(tar::EntryType::Symlink, 0, 0o777);
        self.0.append_link(&mut header, path, target).unwrap();
    }

    pub(crate) fn done(self) -> Vec<u8> {
        let mut bytes = self.0.into_inner().unwrap();
        bytes.flush().unwrap();
        bytes
    }
}
