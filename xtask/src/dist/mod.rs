//! Files to install windlass from: archive, Debian package, container image, bill of materials and checksums.
//!
//! The same input gives the same bytes: times are those of `SOURCE_DATE_EPOCH`, owners and order are fixed.

mod checksums;
mod debian;
mod manual;
mod oci;
#[cfg(test)]
mod tests;
mod tree;
mod units;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    args::Args,
    elf::{self, Architecture},
    output,
    process::{self, ScratchDir},
    release, sbom,
    workspace::Workspace,
};
use manual::HelpTexts;
use tree::FileTree;

/// Programs that this command calls, with the Debian package of each.
const PROGRAMS: &[(&str, &str)] =
    &[("dpkg-deb", "dpkg"), ("gzip", "gzip"), ("objcopy", "binutils"), ("date", "coreutils")];

/// Completion scripts: shell, file below `share`.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "bash-completion/completions/windlass"),
    ("zsh", "zsh/vendor-completions/_windlass"),
    ("fish", "fish/vendor_completions.d/windlass.fish"),
];

#[derive(Debug, Default)]
pub(crate) struct DistOptions {
    /// Cargo's profile. Default: `release`.
    profile: Option<String>,
    /// Directory with finished binaries, instead of a build.
    binaries: Option<PathBuf>,
    /// SSH key that signs the checksums.
    key: Option<PathBuf>,
}

/// Files of `packaging/` and texts of the repository.
#[derive(Clone, Debug)]
pub(super) struct Packaging {
    pub(super) units: BTreeMap<String, String>,
    pub(super) settings: BTreeMap<String, String>,
    pub(super) scripts: BTreeMap<String, String>,
    pub(super) sysusers: String,
    pub(super) copyright: String,
    pub(super) changelog: String,
    pub(super) licence: String,
    /// Alert rules and dashboard.
    pub(super) monitoring: BTreeMap<&'static str, String>,
}

/// Everything that the files of a release are made from.
#[derive(Clone, Debug)]
pub(super) struct Release {
    pub(super) version: String,
    pub(super) architecture: Architecture,
    /// Time of all files, in seconds since 1970.
    pub(super) epoch: u64,
    /// Directory with the stripped programs.
    pub(super) programs: PathBuf,
    pub(super) help: HelpTexts,
    /// Completion scripts by shell.
    pub(super) completions: BTreeMap<&'static str, String>,
    pub(super) sbom: String,
    pub(super) packaging: Packaging,
}

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let options = DistOptions {
        profile: args.value("--profile")?,
        binaries: args.value("--binaries")?,
        key: args.value("--sign")?,
    };
    let is_tried = args.take_flag("--try");
    args.finish()?;
    if options.profile.is_some() && options.binaries.is_some() {
        bail!("`--profile` has no effect on `--binaries`: use one of them");
    }
    let files = make(workspace, &options)?;
    for file in &files {
        let size = tree::file_size(file)?;
        output::print_result(&format!("{:>11} bytes  {}", size, file.display()));
    }
    if let Some(missing) =
        explain_missing_architecture(elf::architecture(&dist_dir(workspace)?.join("windlass"))?)
    {
        output::print_message(missing);
    }
    if is_tried { try_install(workspace, &files) } else { Ok(()) }
}

/// Makes the files from binaries that are built already, and installs the package in a separate Debian.
pub(crate) fn run_with_binaries(workspace: &Workspace, binaries: &Path) -> Result<()> {
    let options = DistOptions { binaries: Some(binaries.to_owned()), ..DistOptions::default() };
    try_install(workspace, &make(workspace, &options)?)
}

/// Installs, upgrades and removes the package in a Debian made with debootstrap, which is kept for the next call.
fn try_install(workspace: &Workspace, files: &[PathBuf]) -> Result<()> {
    let package = files.iter().find(|file| file.extension().is_some_and(|end| end == "deb"));
    let mut script = Command::new(workspace.root.join("packaging/try-install.sh"));
    script.arg(package.context("no package was made")?).arg(workspace.target()?.join("dist-debian"));
    process::run(&mut script)
}

/// Explains how to make the files for the architecture that was not built.
fn explain_missing_architecture(built: Architecture) -> Option<&'static str> {
    match built {
        Architecture::X86_64 => Some(
            "not made: files for aarch64. Run this command on an aarch64 machine: a cross build needs \
             `rustup target add aarch64-unknown-linux-gnu`, a C compiler (`gcc-aarch64-linux-gnu`) and \
             `libc6-dev-arm64-cross`, and the manual pages need programs that run here",
        ),
        Architecture::Aarch64 => None,
    }
}

fn dist_dir(workspace: &Workspace) -> Result<PathBuf> {
    Ok(workspace.target()?.join("dist"))
}

/// Makes all files in `target/dist` and returns their paths.
fn make(workspace: &Workspace, options: &DistOptions) -> Result<Vec<PathBuf>> {
    check_programs()?;
    let dist = dist_dir(workspace)?;
    fs::create_dir_all(&dist).with_context(|| format!("failed to create `{}`", dist.display()))?;
    let from = match &options.binaries {
        Some(dir) => dir.clone(),
        None => {
            let profile = options.profile.as_deref().unwrap_or("release");
            release::build(workspace, profile)?;
            let built = workspace.built(profile, "windlass")?;
            built.parent().context("the binary has no directory")?.to_owned()
        }
    };
    for name in release::binaries() {
        let (stripped, _) = release::split_symbols(&from.join(name), &dist)?;
        elf::check_static(&stripped)?;
    }
    let release = Release::read(workspace, &dist)?;
    release.check_units()?;
    let mut files = write_all(&release, &dist)?;
    let sums = checksums::write(&dist, &files)?;
    if let Some(key) = &options.key {
        files.push(checksums::sign(&sums, key)?);
    }
    files.push(sums);
    Ok(files)
}

fn check_programs() -> Result<()> {
    let is_missing = |(name, _): &&(&str, &str)| !process::succeeds(name, &["--version"]);
    let missing: Vec<&(&str, &str)> = PROGRAMS.iter().filter(is_missing).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    bail!("missing: {}. Run `apt-get install {}`", names.join(", "), packages.join(" "))
}

/// Writes archive, package, image and bill of materials to `dir`.
fn write_all(release: &Release, dir: &Path) -> Result<Vec<PathBuf>> {
    let scratch = ScratchDir::new(&format!("dist-{}", dir.to_string_lossy().replace('/', "-")))?;
    let (version, machine) = (&release.version, release.machine());
    let archive = dir.join(format!("windlass-{version}-{machine}-linux.tar.gz"));
    let package = dir.join(format!("windlass_{version}_{}.deb", release.debian_architecture()));
    let image = dir.join(format!("windlass-{version}-{machine}-oci.tar"));
    let bill = dir.join(format!("windlass-{version}.cdx.json"));

    let tar = scratch.path().join("archive.tar");
    let root = format!("windlass-{version}-{machine}-linux/");
    archive_files(release)?.write_tar(&tar, &root, release.epoch)?;
    tree::gzip(&tar, &archive)?;
    for (name, write) in
        [("deb", debian::write as fn(&Release, &Path, &Path) -> Result<()>), ("oci", oci::write)]
    {
        let dir = scratch.path().join(name);
        fs::create_dir(&dir)?;
        write(release, &dir, if name == "deb" { &package } else { &image })?;
    }
    fs::write(&bill, &release.sbom).with_context(|| format!("failed to write `{}`", bill.display()))?;
    Ok(vec![archive, package, image, bill])
}

/// Returns the files of the archive, to be extracted below `/usr/local`.
fn archive_files(release: &Release) -> Result<FileTree> {
    let mut files = FileTree::default();
    for name in release::binaries() {
        files.add_file(&format!("bin/{name}"), 0o755, &release.programs.join(name));
    }
    for (name, text) in &release.packaging.units {
        let text = text.replace("=/usr/bin/windlass", "=/usr/local/bin/windlass");
        files.add_bytes(&format!("lib/systemd/system/{name}"), 0o644, text);
    }
    files.add_bytes("lib/sysusers.d/windlass.conf", 0o644, release.packaging.sysusers.as_str());
    for (name, text) in &release.packaging.settings {
        files.add_bytes(&format!("share/doc/windlass/settings/{name}"), 0o644, text.as_str());
    }
    release.add_documentation(&mut files, "share")?;
    files.add_bytes("share/doc/windlass/LICENSE", 0o644, release.packaging.licence.as_str());
    files.add_bytes("share/doc/windlass/CHANGELOG.md", 0o644, release.packaging.changelog.as_str());
    files.add_bytes("share/doc/windlass/sbom.cdx.json", 0o644, release.sbom.as_str());
    Ok(files)
}

impl Packaging {
    fn read(workspace: &Workspace) -> Result<Self> {
        let dir = |name: &str| read_dir(&workspace.root.join("packaging").join(name));
        Ok(Self {
            units: dir("systemd")?,
            settings: dir("etc")?,
            scripts: dir("debian")?,
            sysusers: workspace.read("packaging/sysusers.conf")?,
            copyright: workspace.read("packaging/debian/copyright")?,
            changelog: workspace.read("CHANGELOG.md")?,
            licence: workspace.read("LICENSE")?,
            monitoring: ["alerts.yml", "dashboard.json"]
                .into_iter()
                .map(|name| Ok((name, workspace.read(&format!("docs/operations/{name}"))?)))
                .collect::<Result<_>>()?,
        })
    }
}

/// Returns the texts of the files of a directory, by name.
fn read_dir(dir: &Path) -> Result<BTreeMap<String, String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("failed to read `{}`", dir.display()))?;
    let mut texts = BTreeMap::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a file has no name")?;
        let text =
            fs::read_to_string(&path).with_context(|| format!("failed to read `{}`", path.display()))?;
        texts.insert(name.to_owned(), text);
    }
    Ok(texts)
}

impl Release {
    /// Reads everything about the stripped programs in `programs`.
    fn read(workspace: &Workspace, programs: &Path) -> Result<Self> {
        let main = programs.join("windlass");
        let architecture = elf::architecture(&main)?;
        let mut help = HelpTexts::new();
        for name in release::binaries() {
            let program = programs.join(name);
            if elf::architecture(&program)? != architecture {
                bail!("the programs in `{}` are for different architectures", programs.display());
            }
            help.extend(manual::read_help(&program)?);
        }
        let mut completions = BTreeMap::new();
        for (shell, _) in COMPLETIONS {
            completions.insert(*shell, manual::run_plain(&main, ["completion", shell].into_iter())?);
        }
        Ok(Self {
            version: read_version(&main)?,
            architecture,
            epoch: read_epoch(workspace)?,
            programs: programs.to_owned(),
            help,
            completions,
            sbom: sbom::read(workspace)?,
            packaging: Packaging::read(workspace)?,
        })
    }

    /// Checks that each unit and its settings use only flags and variables that the programs have.
    fn check_units(&self) -> Result<()> {
        for (name, text) in &self.packaging.units {
            let stem = name.strip_prefix("windlass-").unwrap_or(name).trim_end_matches(".service");
            let settings = self.packaging.settings.get(&format!("{}.env", stem.trim_end_matches('@')));
            units::check(name, text, settings.map(String::as_str), &self.help)?;
        }
        Ok(())
    }

    fn machine(&self) -> &'static str {
        match self.architecture {
            Architecture::X86_64 => "x86_64",
            Architecture::Aarch64 => "aarch64",
        }
    }

    /// The name of the architecture in Debian and in container images.
    fn debian_architecture(&self) -> &'static str {
        match self.architecture {
            Architecture::X86_64 => "amd64",
            Architecture::Aarch64 => "arm64",
        }
    }

    /// The time of all files, as in `2026-01-31T12:00:00Z`.
    fn time(&self) -> Result<String> {
        let mut command = Command::new("date");
        command.args(["--utc", "--date", &format!("@{}", self.epoch), "+%Y-%m-%dT%H:%M:%SZ"]);
        Ok(process::run_for_stdout(&mut command)?.trim().to_owned())
    }

    /// Adds manual pages and completion scripts below `share`.
    fn add_documentation(&self, files: &mut FileTree, share: &str) -> Result<()> {
        for (title, help) in &self.help {
            let page = manual::page(title, help, &self.version);
            let path = format!("{share}/man/man1/{}.1.gz", title.replace(' ', "-"));
            files.add_bytes(&path, 0o644, tree::gzip_bytes(page.as_bytes())?);
        }
        for (shell, path) in COMPLETIONS {
            let script = self.completions.get(shell).with_context(|| format!("no completion for {shell}"))?;
            files.add_bytes(&format!("{share}/{path}"), 0o644, script.as_str());
        }
        for (name, text) in &self.packaging.monitoring {
            files.add_bytes(&format!("{share}/doc/windlass/monitoring/{name}"), 0o644, text.as_str());
        }
        Ok(())
    }
}

/// Returns the version that a program prints: `windlass 0.1.0`.
fn read_version(program: &Path) -> Result<String> {
    let line = manual::run_plain(program, ["--version"].into_iter())?;
    let version = line.split_whitespace().nth(1);
    version.map(str::to_owned).with_context(|| format!("`--version` printed `{}`", line.trim()))
}

/// Returns `SOURCE_DATE_EPOCH`, or the time of the last commit.
fn read_epoch(workspace: &Workspace) -> Result<u64> {
    if let Ok(text) = std::env::var("SOURCE_DATE_EPOCH") {
        return text.parse().with_context(|| {
            format!("invalid `SOURCE_DATE_EPOCH` value `{text}`: expected seconds since 1970")
        });
    }
    let mut git = Command::new("git");
    git.current_dir(&workspace.root).args(["-c", "safe.directory=*", "log", "-1", "--format=%ct"]);
    let time = process::run_for_stdout(&mut git)
        .context("failed to read the time of the last commit; set `SOURCE_DATE_EPOCH`")?;
    time.trim().parse().context("failed to parse the time of the last commit")
}
