//! The git of this host, for images that have none: a copy of the program with all its libraries.
//!
//! Containers mount the copy read-only. The runner starts it through the agent's binary, which executes it with the
//! loader and the libraries of this host (`runner::repo::host_git`). So repositories are cloned in the container, with
//! its network and as its user, also where the image contains a single static program.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    digest::sha256_hex,
    task_dir::{AGENT_IN_CONTAINER, host_git},
};

/// Programs that `git clone`, `git fetch` and `git submodule` start, as far as the host has them.
const HELPERS: [&str; 6] = [
    "git-remote-http",
    "git-remote-https",
    "git-submodule",
    "git-sh-setup",
    "git-sh-i18n",
    "git-sh-i18n--envsubst",
];
/// Libraries that name resolution loads at run time.
const LOADED_LATER: [&str; 3] = ["libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2"];
/// Certificates of the authorities that hosts trust, by distribution.
const AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];
const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const PROGRAM_HEADER_INTERPRETER: u32 = 3;
const INTERPRETER_BYTES_MAX: u64 = 4096;

/// Copies git and its libraries below `home`, unless the copy exists. Returns its directory, or `None` if the host has
/// no git.
pub(super) fn install(home: &Path, search: &OsStr) -> io::Result<Option<PathBuf>> {
    let is_program = |path: &PathBuf| path.metadata().is_ok_and(|meta| meta.mode() & 0o111 != 0);
    let Some(git) = std::env::split_paths(search).map(|dir| dir.join("git")).find(is_program) else {
        return Ok(None);
    };
    let files = list_files(&git)?;
    let dir = home.join("git");
    let target = dir.join(key(&files)?);
    if target.is_dir() {
        return Ok(Some(target));
    }
    fs::create_dir_all(&dir)?;
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let half = dir.join(format!(".{}", hex::encode(random)));
    let copied = copy(&files, &half).and_then(|()| fs::rename(&half, &target));
    // Another agent may have been faster.
    if copied.is_err() {
        let _ = fs::remove_dir_all(&half);
    }
    if target.is_dir() { Ok(Some(target)) } else { copied.map(|()| None) }
}

/// Removes copies of other versions that no container uses, and incomplete copies left by a crash.
pub(in crate::shim) fn remove_unused(current: &Path, used: &[PathBuf]) {
    let entries = current.parent().map(fs::read_dir).into_iter().flatten().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        if path != current && !used.contains(&path) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Files of the copy, by their relative path: their source on the host.
type Files = BTreeMap<PathBuf, PathBuf>;

fn list_files(git: &Path) -> io::Result<Files> {
    let printed = Command::new(git).arg("--exec-path").output()?;
    let helpers = PathBuf::from(String::from_utf8_lossy(&printed.stdout).trim());
    let mut files = Files::new();
    let programs = HELPERS.iter().map(|name| (*name, helpers.join(name))).filter(|(_, path)| path.is_file());
    for (name, path) in std::iter::once(("git", git.to_owned())).chain(programs) {
        let path = fs::canonicalize(path)?;
        match interpreter(&path)? {
            Binary::Script => {
                files.insert(Path::new(host_git::COMMANDS).join(name), path);
            }
            Binary::Static => {
                files.insert(Path::new(host_git::PROGRAMS).join(name), path);
            }
            Binary::Dynamic { loader } => {
                add_libraries(&mut files, &loader, &path)?;
                files.insert(host_git::LOADER.into(), fs::canonicalize(loader)?);
                files.insert(Path::new(host_git::PROGRAMS).join(name), path);
            }
        }
    }
    if let Some(found) = AUTHORITIES.iter().map(PathBuf::from).find(|path| path.is_file()) {
        files.insert(host_git::AUTHORITIES.into(), fs::canonicalize(found)?);
    }
    Ok(files)
}

/// Adds the libraries that the loader finds for a program.
fn add_libraries(files: &mut Files, loader: &Path, program: &Path) -> io::Result<()> {
    let listed = Command::new(loader).arg("--list").arg(program).output()?;
    if !listed.status.success() {
        let message = String::from_utf8_lossy(&listed.stderr).trim().to_owned();
        return Err(io::Error::other(format!(
            "failed to list the libraries of {}: {message}",
            program.display()
        )));
    }
    for (name, path) in parse_libraries(&String::from_utf8_lossy(&listed.stdout)) {
        let next_to = |other: &str| Some((other.to_owned(), path.parent()?.join(other)));
        let later = LOADED_LATER.iter().filter_map(|other| next_to(other)).filter(|(_, path)| path.is_file());
        let later: Vec<_> = if name == "libc.so.6" { later.collect() } else { Vec::new() };
        for (name, path) in later.into_iter().chain([(name, path.clone())]) {
            files.insert(Path::new(host_git::LIBRARIES).join(name), fs::canonicalize(path)?);
        }
    }
    Ok(())
}

/// Reads lines such as `libz.so.1 => /lib/libz.so.1 (0x7f…)`. The kernel's own library and the loader have no arrow.
fn parse_libraries(listed: &str) -> Vec<(String, PathBuf)> {
    let library = |line: &str| {
        let (name, found) = line.trim().split_once(" => ")?;
        let path = found.rsplit_once(" (").map_or(found, |(path, _)| path);
        let is_name = !name.contains('/') && path.starts_with('/');
        is_name.then(|| (name.to_owned(), PathBuf::from(path)))
    };
    listed.lines().filter_map(library).collect()
}

enum Binary {
    Script,
    Static,
    Dynamic { loader: PathBuf },
}

/// Reads which loader a program names in its header.
fn interpreter(path: &Path) -> io::Result<Binary> {
    let mut file = File::open(path)?;
    let mut head = [0u8; 64];
    let is_elf = file.read_exact(&mut head).is_ok() && head.starts_with(&ELF_MAGIC);
    if !is_elf {
        return Ok(Binary::Script);
    }
    let u16_at = |at: usize| u64::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let (size, count) = (u16_at(0x36), u16_at(0x38));
    let table = u64_at(&head, 0x20);
    for number in 0..count {
        let mut entry = [0u8; 56];
        file.seek(SeekFrom::Start(table.saturating_add(number * size)))?;
        file.read_exact(&mut entry)?;
        if u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) == PROGRAM_HEADER_INTERPRETER {
            file.seek(SeekFrom::Start(u64_at(&entry, 8)))?;
            let mut name = Vec::new();
            file.take(u64_at(&entry, 0x20).min(INTERPRETER_BYTES_MAX)).read_to_end(&mut name)?;
            let name = String::from_utf8_lossy(&name);
            return Ok(Binary::Dynamic { loader: PathBuf::from(name.trim_end_matches('\0')) });
        }
    }
    Ok(Binary::Static)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0u8; 8];
    if let Some(found) = bytes.get(at..at + 8) {
        value.copy_from_slice(found);
    }
    u64::from_le_bytes(value)
}

/// Name of the copy. It changes with every file.
fn key(files: &Files) -> io::Result<String> {
    let mut text = String::from(AGENT_IN_CONTAINER);
    for (target, source) in files {
        let meta = fs::metadata(source)?;
        let stamp = (meta.size(), meta.mtime(), meta.mtime_nsec());
        text += &format!("\n{} {} {stamp:?}", target.display(), source.display());
    }
    Ok(sha256_hex(text.as_bytes()))
}

fn copy(files: &Files, half: &Path) -> io::Result<()> {
    for dir in [host_git::COMMANDS, host_git::PROGRAMS, host_git::LIBRARIES] {
        fs::create_dir_all(half.join(dir))?;
    }
    for (target, source) in files {
        let to = half.join(target);
        fs::copy(source, &to)?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o555))?;
        if let Ok(program) = target.strip_prefix(host_git::PROGRAMS) {
            symlink(AGENT_IN_CONTAINER, half.join(host_git::COMMANDS).join(program))?;
        }
    }
    for dir in [host_git::COMMANDS, host_git::PROGRAMS, host_git::LIBRARIES, ""] {
        fs::set_permissions(half.join(dir), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use windlass_testkit::temp_dir;

    use super::*;

    #[test]
    fn the_git_of_this_host_is_copied_once_with_its_loader_and_libraries() {
        let home = temp_dir("host-git").unwrap();
        let search = std::env::var_os("PATH").unwrap();
        let copy = install(home.path(), &search).unwrap().unwrap();
        for file in ["ld.so", "lib/libc.so.6", "programs/git", "programs/git-remote-https"] {
            assert!(copy.join(file).is_file(), "{file}");
        }
        assert_eq!(fs::read_link(copy.join("commands/git")).unwrap(), Path::new("/windlass/agent"));
        let run = Command::new(copy.join("ld.so"))
            .arg("--library-path")
            .arg(copy.join("lib"))
            .arg(copy.join("programs/git"))
            .arg("--version")
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&run.stdout).starts_with("git version"), "{run:?}");
        let made = fs::metadata(&copy).unwrap().ino();
        fs::create_dir(home.path().join("git/.half")).unwrap();
        assert_eq!(install(home.path(), &search).unwrap().as_ref(), Some(&copy));
        assert_eq!(fs::metadata(&copy).unwrap().ino(), made, "not copied again");
        remove_unused(&copy, &[]);
        assert_eq!(fs::read_dir(home.path().join("git")).unwrap().count(), 1);
        assert!(install(home.path(), OsStr::new("/nonexistent")).unwrap().is_none());
    }

    #[test]
    fn libraries_are_read_from_the_output_of_each_loader() {
        let glibc = "\tlinux-vdso.so.1 (0x00007f3a)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f3a)\n\
                     \t/lib64/ld-linux-x86-64.so.2 (0x00007f3a)\n";
        assert_eq!(
            parse_libraries(glibc),
            [("libz.so.1".to_owned(), "/lib/x86_64-linux-gnu/libz.so.1".into())]
        );
        let musl =
            "\t/lib/ld-musl-x86_64.so.1 (0x7f)\n\tlibc.musl-x86_64.so.1 => /lib/ld-musl-x86_64.so.1 (0x7f)\n";
        assert_eq!(
            parse_libraries(musl),
            [("libc.musl-x86_64.so.1".to_owned(), "/lib/ld-musl-x86_64.so.1".into())]
        );
    }
}
