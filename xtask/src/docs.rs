//! The documentation site: pages of `docs/`, built by MkDocs with the theme in `xtask/site`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{args::Args, output, process::ScratchDir, venv, workspace::Workspace};

pub(crate) fn run(workspace: &Workspace, mut args: Args) -> Result<()> {
    let is_check = args.take_flag("--check");
    args.finish()?;
    if is_check {
        let pages = check(workspace)?;
        output::print_message(&format!("{pages} pages, no problems"));
        return Ok(());
    }
    let site = workspace.target()?.join("docs");
    build(workspace, &site)?;
    output::print_result(&site.join("index.html").display().to_string());
    Ok(())
}

/// Builds the site in a temporary directory, and returns the number of its pages. Fails if a link, an anchor or an entry
/// of the navigation leads nowhere, if a page is not in the navigation, if a page loads a file of another host, or if an
/// alert rule or the dashboard names a metric that does not exist.
pub(crate) fn check(workspace: &Workspace) -> Result<usize> {
    let scratch = ScratchDir::new("docs")?;
    let site = scratch.path().join("site");
    build(workspace, &site)?;
    let mut pages = Vec::new();
    collect_pages(&site, &mut pages)?;
    Ok(pages.len())
}

fn build(workspace: &Workspace, site: &Path) -> Result<()> {
    let venv = venv::DOCS.ensure(workspace)?;
    let mut command = Command::new(venv.join("bin/python"));
    command
        .args(["-m", "mkdocs", "build", "--strict", "--config-file"])
        .arg(workspace.root.join("xtask/site/mkdocs.yml"))
        .arg("--site-dir")
        .arg(site)
        // The directory of the hooks stays clean.
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let done = command.output().context("failed to start MkDocs")?;
    if !done.status.success() {
        let message = String::from_utf8_lossy(&done.stderr);
        let problems: Vec<&str> = message.lines().filter(|line| !line.starts_with("INFO ")).collect();
        bail!("the documentation has problems:\n{}", problems.join("\n").trim());
    }
    Ok(())
}

fn collect_pages(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("failed to list `{}`", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect_pages(&path, found)?;
        } else if path.extension().is_some_and(|end| end == "html") {
            found.push(path);
        }
    }
    Ok(())
}
