//! A Python environment with `moto`, an object store that the tests speak S3 with. Made once below `target`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{out, process, workspace::Workspace};

/// How tests learn where the environment is.
pub(crate) const VARIABLE: &str = "WINDLASS_TEST_MOTO";
/// What is installed there; a change makes a new environment.
const PACKAGES: &[&str] = &["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5", "werkzeug==3.1.9"];
const NAME: &str = "moto-5.2.5";

pub(crate) fn ensure(workspace: &Workspace) -> Result<PathBuf> {
    let home = workspace.target()?.join("tools").join(NAME);
    if answers(&home) {
        return Ok(home);
    }
    out::talk("missing here: moto, an object store for tests; installing it from PyPI once");
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home))?;
    let mut pip = Command::new(home.join("bin/pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-compile"]).args(PACKAGES);
    process::run(&mut pip).context("install moto from PyPI")?;
    anyhow::ensure!(answers(&home), "moto was installed in {} but does not start", home.display());
    Ok(home)
}

fn answers(home: &Path) -> bool {
    process::answers(home.join("bin/python"), &["-c", "import boto3, moto.server"])
}
