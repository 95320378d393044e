//! Python environments with third-party programs for tests and benchmarks. Each is created once below `target` from its
//! file in `xtask/venvs`, and recreated when that file changes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{output, process, workspace::Workspace};

pub(crate) struct Venv {
    /// Name of its directory.
    name: &'static str,
    /// Purpose, for messages.
    purpose: &'static str,
    /// Requirements for pip, with every version pinned.
    requirements: &'static str,
    /// Modules that Python must be able to import when it is complete.
    imports: &'static str,
    /// Environment variable for its directory.
    variable: &'static str,
}

const MOTO: Venv = Venv {
    name: "moto",
    purpose: "moto (an object store, and the API of EC2)",
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
/// Contains the dstack server: a test sends it the same requests as the windlass server, and benchmarks measure both.
const DSTACK_SERVER: Venv = Venv {
    name: "dstack-server",
    purpose: "dstack's server (for comparison)",
    requirements: include_str!("../venvs/dstack-server.txt"),
    imports: "dstack._internal.server.main",
    variable: "WINDLASS_BENCH_DSTACK",
};

/// Generates requests from an OpenAPI document.
pub(crate) const SCHEMATHESIS: Venv = Venv {
    name: "schemathesis",
    purpose: "schemathesis (generates API requests)",
    requirements: include_str!("../venvs/schemathesis.txt"),
    imports: "schemathesis",
    variable: "WINDLASS_TEST_SCHEMATHESIS",
};

/// Builds the documentation site, and parses the expressions of alert rules.
pub(crate) const DOCS: Venv = Venv {
    name: "docs",
    purpose: "MkDocs (builds the documentation site)",
    requirements: include_str!("../venvs/docs.txt"),
    imports: "mkdocs, promql_parser, pygments",
    variable: "WINDLASS_TEST_DOCS",
};

/// An OpenID Connect provider, with which users log in to the web UI.
const OIDC: Venv = Venv {
    name: "oidc",
    purpose: "an OpenID Connect provider",
    requirements: include_str!("../venvs/oidc.txt"),
    imports: "oidc_provider_mock",
    variable: "WINDLASS_TEST_OIDC",
};

/// Environments that the tests need.
const TEST_VENVS: &[Venv] = &[MOTO, DSTACK, ARVADOS, DSTACK_SERVER, OIDC];

/// Creates the environment that the pages of the web UI need, and returns its variable with its directory.
pub(crate) fn ensure_for_web(workspace: &Workspace) -> Result<(&'static str, PathBuf)> {
    Ok((OIDC.variable, OIDC.ensure(workspace)?))
}

/// Creates the environments of the tests, and returns the variables with their directories.
pub(crate) fn ensure_for_tests(workspace: &Workspace) -> Result<Vec<(&'static str, PathBuf)>> {
    TEST_VENVS.iter().map(|venv| Ok((venv.variable, venv.ensure(workspace)?))).collect()
}

/// Creates the environment of the server that benchmarks compare with, and returns its variable with its directory.
pub(crate) fn ensure_for_peer(workspace: &Workspace) -> Result<(&'static str, PathBuf)> {
    Ok((DSTACK_SERVER.variable, DSTACK_SERVER.ensure(workspace)?))
}

impl Venv {
    /// Returns the directory of the environment; creates it if necessary.
    pub(crate) fn ensure(&self, workspace: &Workspace) -> Result<PathBuf> {
        let home = workspace.target()?.join("tools").join(self.name);
        if self.is_complete(&home) {
            return Ok(home);
        }
        output::print_message(&format!("missing: {}; installing it from PyPI", self.purpose));
        self.create(&home)
            .with_context(|| format!("failed to create the Python environment `{}`", self.name))?;
        anyhow::ensure!(
            self.is_complete(&home),
            "{} was installed, but its modules cannot be imported",
            home.display()
        );
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

    /// The marker file is written last: an environment without it is incomplete.
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
    fn every_python_requirement_is_pinned() {
        for venv in TEST_VENVS.iter().chain([&SCHEMATHESIS, &DOCS]) {
            for line in venv.requirements.lines() {
                assert!(line.contains("=="), "{}: {line}", venv.name);
            }
        }
    }

    #[test]
    fn an_unfinished_or_outdated_venv_is_not_complete() {
        let home = process::ScratchDir::new("venv").unwrap();
        assert!(!MOTO.is_complete(home.path()));
        fs::write(marker_file(home.path()), "moto==1.0\n").unwrap();
        assert!(!MOTO.is_complete(home.path()));
    }
}
