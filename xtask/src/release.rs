//! The files of a release: both binaries without symbols, and their symbols in separate files.
//!
//! `windlass` references `windlass.debug` in its section `.gnu_debuglink`. A backtrace, gdb and perf read lines and
//! names from that file if it is in the same directory, so it can be copied to a host when needed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{elf, output, process, workspace::Workspace};

struct Artifact {
    package: &'static str,
    binary: &'static str,
    /// Size limit in megabytes: the agent is copied to every host.
    max_megabytes: u64,
}

const ARTIFACTS: &[Artifact] = &[
    Artifact { package: "windlass-cli", binary: "windlass", max_megabytes: 30 },
    Artifact { package: "windlass-agent", binary: "windlass-agent", max_megabytes: 10 },
];

/// Names of the binaries of a release.
pub(crate) fn binaries() -> impl Iterator<Item = &'static str> {
    ARTIFACTS.iter().map(|artifact| artifact.binary)
}

/// Builds both binaries and writes four files to `target/dist`.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    build(workspace, "release")?;
    let dist = workspace.target()?.join("dist");
    std::fs::create_dir_all(&dist).with_context(|| format!("failed to create `{}`", dist.display()))?;
    let mut too_large = Vec::new();
    for artifact in ARTIFACTS {
        let built = workspace.built("release", artifact.binary)?;
        let (stripped, symbols) = split_symbols(&built, &dist)?;
        elf::check_static(&stripped)?;
        let size = file_size(&stripped)?;
        output::print_result(&format!("{:>7.1} MB  {}", megabytes(size), stripped.display()));
        output::print_result(&format!(
            "{:>7.1} MB  {}",
            megabytes(self::file_size(&symbols)?),
            symbols.display()
        ));
        if size > artifact.max_megabytes * 1_000_000 {
            too_large.push(format!("`{}` is larger than {} MB", artifact.binary, artifact.max_megabytes));
        }
    }
    if too_large.is_empty() { Ok(()) } else { bail!("{}", too_large.join("; ")) }
}

/// Builds both binaries with a profile of cargo.
pub(crate) fn build(workspace: &Workspace, profile: &str) -> Result<()> {
    let mut build = workspace.cargo();
    build.args(["build", "--profile", profile, "--locked"]);
    for artifact in ARTIFACTS {
        build.args(["-p", artifact.package, "--bin", artifact.binary]);
    }
    process::run(&mut build)
}

/// Copies `built` to `dir` without symbols, and its symbols to a file that the copy references.
pub(crate) fn split_symbols(built: &Path, dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let name = built
        .file_name()
        .and_then(|name| name.to_str())
        .context("cannot determine the name of the binary")?;
    let (stripped, symbols) = (dir.join(name), dir.join(format!("{name}.debug")));
    // zlib, because the standard library's backtraces support no other compression.
    objcopy(&["--only-keep-debug", "--compress-debug-sections=zlib"], built, &symbols)?;
    let link = format!("--add-gnu-debuglink={}", symbols.display());
    objcopy(&["--strip-all", &link], built, &stripped)?;
    Ok((stripped, symbols))
}

fn objcopy(options: &[&str], from: &Path, to: &Path) -> Result<()> {
    process::run(Command::new("objcopy").args(options).arg(from).arg(to))
}

fn file_size(path: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    Ok(metadata.len())
}

#[expect(clippy::cast_precision_loss, reason = "sizes of files, shown with one decimal")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;
    use crate::process::ScratchDir;

    /// Set for the copy of this program that prints a backtrace.
    const CHILD: &str = "XTASK_RELEASE_TEST_CHILD";

    #[test]
    fn a_stripped_binary_finds_its_debug_symbols_in_the_adjacent_file() {
        if std::env::var_os(CHILD).is_some() {
            output::print_result(&Backtrace::force_capture().to_string());
            return;
        }
        let dir = ScratchDir::new("release-test").unwrap();
        let (stripped, symbols) = split_symbols(&std::env::current_exe().unwrap(), dir.path()).unwrap();
        let backtrace = || {
            let mut child = Command::new(&stripped);
            let name = "release::tests::a_stripped_binary_finds_its_debug_symbols_in_the_adjacent_file";
            child.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
            process::run_for_stdout(&mut child).unwrap()
        };
        let with_symbols = backtrace();
        assert!(with_symbols.contains("src/release.rs:"), "{with_symbols}");
        std::fs::remove_file(symbols).unwrap();
        let without = backtrace();
        assert!(!without.contains("src/release.rs:"), "{without}");
    }
}
