//! A tree of files with fixed owners, modes and times, as it goes into archives and packages.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

/// Content of one path.
#[derive(Clone, Debug)]
enum Content {
    Directory,
    Bytes(Vec<u8>),
    /// A copy of this file.
    File(PathBuf),
}

#[derive(Clone, Debug)]
struct Entry {
    mode: u32,
    /// User and group id.
    owner: u64,
    content: Content,
}

/// Files by path, without a leading slash, in the order of their names.
#[derive(Clone, Debug, Default)]
pub(super) struct FileTree(BTreeMap<String, Entry>);

impl FileTree {
    pub(super) fn add_bytes(&mut self, path: &str, mode: u32, bytes: impl Into<Vec<u8>>) {
        self.insert(path, Entry { mode, owner: 0, content: Content::Bytes(bytes.into()) });
    }

    /// Adds a copy of `file`.
    pub(super) fn add_file(&mut self, path: &str, mode: u32, file: &Path) {
        self.insert(path, Entry { mode, owner: 0, content: Content::File(file.to_owned()) });
    }

    pub(super) fn add_directory(&mut self, path: &str, mode: u32, owner: u64) {
        self.insert(path, Entry { mode, owner, content: Content::Directory });
    }

    /// Adds an entry, and directories with the usual mode above it.
    fn insert(&mut self, path: &str, entry: Entry) {
        for (at, _) in path.match_indices('/') {
            let parent = Entry { mode: 0o755, owner: 0, content: Content::Directory };
            self.0.entry(path[..at].to_owned()).or_insert(parent);
        }
        self.0.insert(path.to_owned(), entry);
    }

    pub(super) fn files(&self) -> impl Iterator<Item = &str> {
        let files = self.0.iter().filter(|(_, entry)| !matches!(entry.content, Content::Directory));
        files.map(|(path, _)| path.as_str())
    }

    /// Returns the size of all files in bytes.
    pub(super) fn size(&self) -> Result<u64> {
        self.0.values().map(|entry| entry.content.len()).sum()
    }

    /// Writes a tar archive in which every entry has the time `epoch`, with `prefix` before each path.
    pub(super) fn write_tar(&self, to: &Path, prefix: &str, epoch: u64) -> Result<()> {
        let file = fs::File::create(to).with_context(|| format!("failed to create `{}`", to.display()))?;
        let mut archive = tar::Builder::new(std::io::BufWriter::new(file));
        for (path, entry) in &self.0 {
            let mut header = tar::Header::new_ustar();
            header.set_mode(entry.mode);
            header.set_uid(entry.owner);
            header.set_gid(entry.owner);
            header.set_mtime(epoch);
            let is_directory = matches!(entry.content, Content::Directory);
            header.set_entry_type(if is_directory {
                tar::EntryType::Directory
            } else {
                tar::EntryType::Regular
            });
            header.set_size(entry.content.len()?);
            let name = format!("{prefix}{path}{}", if is_directory { "/" } else { "" });
            header.set_path(&name).with_context(|| format!("failed to archive `{name}`"))?;
            header.set_cksum();
            archive.append(&header, entry.content.open()?)?;
        }
        archive.into_inner()?.flush()?;
        Ok(())
    }

    /// Writes the files below `dir`, with their modes and the time `epoch`.
    pub(super) fn write_files(&self, dir: &Path, epoch: u64) -> Result<()> {
        for (path, entry) in &self.0 {
            let to = dir.join(path);
            match &entry.content {
                Content::Directory => fs::create_dir_all(&to),
                Content::Bytes(bytes) => fs::write(&to, bytes),
                Content::File(from) => fs::copy(from, &to).map(|_| ()),
            }
            .and_then(|()| fs::set_permissions(&to, fs::Permissions::from_mode(entry.mode)))
            .with_context(|| format!("failed to write `{}`", to.display()))?;
        }
        // Afterwards, and from below: a new file changes the time of its directory.
        for path in self.0.keys().rev() {
            set_time(&dir.join(path), epoch)?;
        }
        set_time(dir, epoch)
    }
}

impl Content {
    fn len(&self) -> Result<u64> {
        match self {
            Self::Directory => Ok(0),
            Self::Bytes(bytes) => Ok(bytes.len() as u64),
            Self::File(path) => file_size(path),
        }
    }

    fn open(&self) -> Result<Box<dyn Read + '_>> {
        Ok(match self {
            Self::Directory => Box::new(std::io::empty()),
            Self::Bytes(bytes) => Box::new(bytes.as_slice()),
            Self::File(path) => Box::new(
                fs::File::open(path).with_context(|| format!("failed to read `{}`", path.display()))?,
            ),
        })
    }
}

fn set_time(path: &Path, epoch: u64) -> Result<()> {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(epoch);
    fs::File::open(path)
        .and_then(|file| file.set_modified(time))
        .with_context(|| format!("failed to set the time of `{}`", path.display()))
}

pub(super) fn file_size(path: &Path) -> Result<u64> {
    let metadata = fs::metadata(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    Ok(metadata.len())
}

/// Compresses a file without its name and time, with the program `gzip`.
pub(super) fn gzip(from: &Path, to: &Path) -> Result<()> {
    let open = || fs::File::open(from).with_context(|| format!("failed to read `{}`", from.display()));
    let create = || fs::File::create(to).with_context(|| format!("failed to create `{}`", to.display()));
    let mut command = Command::new("gzip");
    command.args(["--no-name", "--stdout"]).stdin(Stdio::from(open()?)).stdout(Stdio::from(create()?));
    crate::process::run(&mut command)
}

/// Compresses bytes like [`gzip`].
pub(super) fn gzip_bytes(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new("gzip")
        .args(["--no-name", "--best", "--stdout"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("failed to start `gzip`")?;
    let mut stdin = child.stdin.take().context("gzip has no input")?;
    let bytes = bytes.to_owned();
    // On another thread: a pipe holds less than a long text.
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let output = child.wait_with_output()?;
    match writer.join() {
        Ok(written) => written.context("failed to write to `gzip`")?,
        Err(_) => bail!("failed to write to `gzip`"),
    }
    ensure!(output.status.success(), "`gzip` failed with {}", output.status);
    Ok(output.stdout)
}

/// Returns the SHA-256 digest of a file, in hexadecimal.
pub(super) fn sha256(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(digest.finalize())),
            len => digest.update(&buffer[..len]),
        }
    }
}
