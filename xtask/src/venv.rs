//! Python environments with programs of others, which tests and benchmarks run beside ours. Each is made once from
//! its file in `xtask/venvs`, below `target`, and made anew when that file changes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{out, process, workspace::Workspace};

pub(crate) struct Venv {
    /// Its directory.
    name: &'static str,
    /// What it is for, in words.
    purpose: &'static str,
    /// What pip installs, every version pinned.
    requirements: &'static str,
    /// What Python must be able to import once it is whole.
    imports: &'static str,
    /// How others learn where it is.
    variable: &'static str,
}

const MOTO: Venv = Venv {
    name: "moto",
    purpose: "an object store",
    requirements: include_str!("../venvs/moto.txt"),
    imports: "boto3, moto.server",
    variable: "WINDLASS_TEST_MOTO",
};
const DSTACK: Venv = Venv {
    name: "dstack",
    purpose: "dstack's command line and Python client",
    requirements: include_str!("../venvs/dstack.txt"),
    imports: "dstack.api, dstack._internal.cli.main",
    variable: "WINDLASS_TEST_DSTACK",
};
const ARVADOS: Venv = Venv {
    name: "arvados",
    purpose: "the Python client of Arvados",
    requirements: include_str!("../venvs/arvados.txt"),
    imports: "arvados.api, arvados.events",
    variable: "WINDLASS_TEST_ARVADOS",
};
/// With dstack's own server in it: a test sends it the requests that ours gets, and benchmarks measure both.
const DSTACK_SERVER: Venv = Venv {
    name: "dstack-server",
    purpose: "dstack's server, to compare ours with",
    requirements: include_str!("../venvs/dstack-server.txt"),
    imports: "dstack._internal.server.main",
    variable: "WINDLASS_BENCH_DSTACK",
};

/// What sends requests made from a document.
pub(crate) const SCHEMATHESIS: Venv = Venv {
    name: "schemathesis",
    purpose: "schemathesis, which makes requests from an OpenAPI document",
    requirements: include_str!("../venvs/schemathesis.txt"),
    imports: "schemathesis",
    variable: "WINDLASS_TEST_SCHEMATHESIS",
};

/// What the tests need.
const TEST_VENVS: &[Venv] = &[MOTO, DSTACK, ARVADOS, DSTACK_SERVER];

/// Makes what the tests need, and gives the variables that say where it is.
pub(crate) fn ensure_for_tests(workspace: &Workspace) -> Result<Vec<(&'static str, PathBuf)>> {
    TEST_VENVS.iter().map(|venv| Ok((venv.variable, venv.ensure(workspace)?))).collect()
}

/// Makes the environment of the peer that we are measured beside, and gives the variable that says where it is.
pub(crate) fn ensure_for_peer(workspace: &Workspace) -> Result<(&'static str, PathBuf)> {
    Ok((DSTACK_SERVER.variable, DSTACK_SERVER.ensure(workspace)?))
}

impl Venv {
    /// The directory of the environment, made if it is not there.
    pub(crate) fn ensure(&self, workspace: &Workspace) -> Result<PathBuf> {
        let home = workspace.target()?.join("tools").join(self.name);
        if self.is_complete(&home) {
            return Ok(home);
        }
        out::print_message(&format!("missing here: {}; installing it from PyPI once", self.purpose));
        self.create(&home).with_context(|| format!("make the Python environment `{}`", self.name))?;
        anyhow::ensure!(self.is_complete(&home), "{} was installed but cannot be imported", home.display());
        Ok(home)
    }

    fn create(&self, home: &Path) -> Result<()> {
        process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(home))?;
        let wanted = home.join("wanted.txt");
        fs::write(&wanted, self.requirements)?;
        let mut pip = Command::new(home.join("bin/pip"));
        let flags = ["install", "--quiet", "--disable-pip-version-check", "--no-compile"];
        process::run(pip.args(flags).arg("-r").arg(&wanted))?;
        fs::rename(wanted, marker_file(home))?;
        Ok(())
    }

    /// The file is the last thing written: an environment without it was left half made.
    fn is_complete(&self, home: &Path) -> bool {
        fs::read_to_string(marker_file(home)).is_ok_and(|text| text == self.requirements)
            && process::succeeds(home.join("bin/python"), &["-c", &format!("import {}", self.imports)])
    }
}

fn marker_file(home: &Path) -> PathBuf {
    home.join("requirements.txt")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_is_pinned() {
        for venv in TEST_VENVS.iter().chain([&SCHEMATHESIS]) {
            for line in venv.requirements.lines() {
                assert!(line.contains("=="), "{}: {line}", venv.name);
            }
        }
    }

    #[test]
    fn an_environment_that_is_half_made_or_older_is_not_whole() {
        let home = process::ScratchDir::new("venv").unwrap();
        assert!(!MOTO.is_complete(home.path()));
        fs::write(marker_file(home.path()), "moto==1.0\n").unwrap();
        assert!(!MOTO.is_complete(home.path()));
    }
}
