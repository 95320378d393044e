//! Derives a configuration from the content of a directory. Pure: the content is an argument.

use std::{collections::BTreeMap, fmt::Write as _};

/// Libraries that usually need a GPU.
const GPU_LIBRARIES: [&str; 14] = [
    "torch",
    "torchvision",
    "tensorflow",
    "jax",
    "vllm",
    "sglang",
    "transformers",
    "deepspeed",
    "accelerate",
    "bitsandbytes",
    "flash-attn",
    "cupy",
    "triton",
    "diffusers",
];
/// Web libraries, with their start command and port.
const WEB_LIBRARIES: [(&str, &str, u16); 5] = [
    ("fastapi", "uvicorn MODULE:app --host 0.0.0.0 --port 8000", 8000),
    ("flask", "flask --app MODULE run --host 0.0.0.0 --port 8000", 8000),
    ("streamlit", "streamlit run FILE --server.address 0.0.0.0 --server.port 8501", 8501),
    ("gradio", "GRADIO_SERVER_NAME=0.0.0.0 python FILE", 7860),
    ("django", "python manage.py runserver 0.0.0.0:8000", 8000),
];
/// Usual entry points, most specific first.
const ENTRY_POINTS: [&str; 7] =
    ["train.py", "main.py", "app.py", "run.py", "server.py", "src/main.py", "src/train.py"];
/// Python versions of the default images.
const PYTHON_VERSIONS: [&str; 5] = ["3.9", "3.10", "3.11", "3.12", "3.13"];
const DEFAULT_PYTHON: &str = "3.12";
/// Image with `conda`, for directories that list their libraries in `environment.yml`.
const CONDA_IMAGE: &str = "condaforge/miniforge3";
const NAME_MIN: usize = 2;
const NAME_MAX: usize = 41;

/// Content of a directory: relative paths, and the text of the relevant files.
#[derive(Clone, Debug, Default)]
pub(super) struct FolderContents {
    pub(super) name: String,
    pub(super) files: Vec<String>,
    pub(super) texts: BTreeMap<String, String>,
}

impl FolderContents {
    fn has(&self, file: &str) -> bool {
        self.files.iter().any(|one| one == file)
    }

    fn text(&self, file: &str) -> &str {
        self.texts.get(file).map_or("", String::as_str)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ConfigKind {
    Task,
    Service,
    DevEnvironment,
}

impl ConfigKind {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Service => "service",
            Self::DevEnvironment => "dev-environment",
        }
    }
}

/// The derived configuration, and the evidence for it.
#[derive(Clone, Debug)]
pub(super) struct GuessedConfig {
    pub(super) kind: ConfigKind,
    pub(super) name: String,
    /// `python: "3.12"` or `image: node:22`; empty for the default image.
    place: String,
    /// Commands that install the libraries.
    setup: Vec<String>,
    commands: Vec<String>,
    port: Option<u16>,
    gpu: bool,
    pub(super) found: Vec<String>,
}

pub(super) fn guess(folder: &FolderContents, kind: Option<ConfigKind>, name: Option<&str>) -> GuessedConfig {
    let mut guess = GuessedConfig {
        kind: ConfigKind::Task,
        name: name.map_or_else(|| resource_name(&folder.name), str::to_owned),
        place: String::new(),
        setup: Vec::new(),
        commands: Vec::new(),
        port: None,
        gpu: false,
        found: Vec::new(),
    };
    let looks = [guess_python, guess_node, guess_rust, guess_go, guess_script];
    if !looks.iter().any(|check| check(folder, &mut guess)) {
        guess.found.push("no known way to run it".to_owned());
        guess.commands.push("echo \"replace this with your command\"".to_owned());
    }
    if folder.has("Dockerfile") {
        guess.found.push("a `Dockerfile`: to use it, push its image to a registry and set `image`".into());
    }
    if let Some(kind) = kind {
        guess.kind = kind;
    }
    if guess.kind == ConfigKind::Service && guess.port.is_none() {
        guess.port = Some(8000);
    }
    guess
}

/// Converts a directory name to lower-case letters, digits and dashes, starting with a letter.
fn resource_name(folder: &str) -> String {
    let mut name = String::new();
    for letter in folder.to_lowercase().chars() {
        let letter = if letter.is_ascii_alphanumeric() { letter } else { '-' };
        if !(letter == '-' && (name.is_empty() || name.ends_with('-'))) {
            name.push(letter);
        }
    }
    let short = name.trim_end_matches('-').len() < NAME_MIN;
    if short || !name.starts_with(|letter: char| letter.is_ascii_lowercase()) {
        name.insert_str(0, "run-");
    }
    name.truncate(NAME_MAX);
    name.trim_end_matches('-').to_owned()
}

fn guess_python(folder: &FolderContents, guess: &mut GuessedConfig) -> bool {
    let lists = ["requirements.txt", "pyproject.toml", "setup.py", "environment.yml", "environment.yaml"];
    let list = lists.into_iter().find(|file| folder.has(file));
    let start = ENTRY_POINTS.into_iter().find(|file| folder.has(file)).map(str::to_owned);
    let start = start.or_else(|| {
        let mut scripts = folder.files.iter().filter(|file| file.ends_with(".py") && !file.contains('/'));
        scripts.find(|file| *file != "setup.py" && *file != "conftest.py").cloned()
    });
    let notebook = folder.files.iter().find(|file| file.ends_with(".ipynb"));
    if list.is_none() && start.is_none() && notebook.is_none() {
        return false;
    }
    let conda = list.filter(|file| file.starts_with("environment."));
    guess.place = match conda {
        Some(_) => format!("image: {CONDA_IMAGE}"),
        None => format!("python: \"{}\"", python_version(folder)),
    };
    guess.found.push(format!("Python ({})", list.or(start.as_deref()).unwrap_or("notebooks")));
    let uv = folder.has("uv.lock");
    guess.setup.extend(match list {
        _ if uv => Some("uv sync".to_owned()),
        Some("requirements.txt") => Some("pip install -r requirements.txt".to_owned()),
        Some("pyproject.toml" | "setup.py") => Some("pip install .".to_owned()),
        // The environment `base` needs no `conda init` and no activation: its programs are first in `PATH`.
        Some(file) => Some(format!("conda env update --name base --file {file}")),
        None => None,
    });
    let listed: String = lists.iter().map(|file| folder.text(file)).collect::<Vec<_>>().join("\n");
    if let Some(library) = GPU_LIBRARIES.into_iter().find(|library| lists_library(&listed, library)) {
        guess.gpu = true;
        guess.found.push(format!("`{library}`, which usually needs a GPU"));
    }
    let web = WEB_LIBRARIES.into_iter().find(|(library, ..)| lists_library(&listed, library));
    let run = |command: String| if uv { format!("uv run {command}") } else { command };
    match (web, start) {
        (Some((library, command, port)), Some(start)) => {
            guess.kind = ConfigKind::Service;
            guess.port = Some(port);
            guess.found.push(format!("`{library}`, a web framework"));
            let module = start.trim_end_matches(".py").replace('/', ".");
            guess.commands.push(run(command.replace("MODULE", &module).replace("FILE", &start)));
        }
        (_, Some(start)) => guess.commands.push(run(format!("python {start}"))),
        (_, None) if notebook.is_some() => {
            guess.kind = ConfigKind::DevEnvironment;
            guess.found.push("notebooks, which need an editor".to_owned());
        }
        (_, None) => guess.commands.push(run("python -c 'print(\"replace this\")'".to_owned())),
    }
    true
}

/// Version of `.python-version`, else the lowest that `requires-python` allows, else the default.
fn python_version(folder: &FolderContents) -> &'static str {
    let pinned = folder.text(".python-version").trim();
    let required =
        folder.text("pyproject.toml").lines().find_map(|line| line.trim().strip_prefix("requires-python"));
    let wanted = if pinned.is_empty() { required.unwrap_or_default() } else { pinned };
    let digits: String = wanted
        .chars()
        .skip_while(|letter| !letter.is_ascii_digit())
        .take_while(|letter| letter.is_ascii_digit() || *letter == '.')
        .collect();
    let short: Vec<&str> = digits.split('.').take(2).collect();
    let short = short.join(".");
    PYTHON_VERSIONS.into_iter().find(|known| *known == short).unwrap_or(DEFAULT_PYTHON)
}

/// Returns whether a list of requirements contains a library as a whole word.
fn lists_library(list: &str, library: &str) -> bool {
    let list = list.to_lowercase();
    let part = |letter: char| letter.is_alphanumeric() || letter == '-' || letter == '_';
    list.match_indices(library).any(|(at, _)| {
        let before = list[..at].chars().next_back();
        let after = list[at + library.len()..].chars().next();
        !before.is_some_and(part) && !after.is_some_and(part)
    })
}

fn guess_node(folder: &FolderContents, guess: &mut GuessedConfig) -> bool {
    if !folder.has("package.json") {
        return false;
    }
    let (install, run) = if folder.has("pnpm-lock.yaml") {
        ("corepack enable && pnpm install --frozen-lockfile", "pnpm start")
    } else if folder.has("yarn.lock") {
        ("corepack enable && yarn install", "yarn start")
    } else if folder.has("package-lock.json") {
        ("npm ci", "npm start")
    } else {
        ("npm install", "npm start")
    };
    guess.place = "image: node:22".to_owned();
    guess.setup.push(install.to_owned());
    guess.commands.push(run.to_owned());
    guess.found.push("Node.js (package.json)".to_owned());
    true
}

fn guess_rust(folder: &FolderContents, guess: &mut GuessedConfig) -> bool {
    let found = folder.has("Cargo.toml");
    if found {
        guess.place = "image: rust:1".to_owned();
        guess.commands.push("cargo run --release".to_owned());
        guess.found.push("Rust (Cargo.toml)".to_owned());
    }
    found
}

fn guess_go(folder: &FolderContents, guess: &mut GuessedConfig) -> bool {
    let found = folder.has("go.mod");
    if found {
        guess.place = "image: golang:1".to_owned();
        guess.commands.push("go run .".to_owned());
        guess.found.push("Go (go.mod)".to_owned());
    }
    found
}

fn guess_script(folder: &FolderContents, guess: &mut GuessedConfig) -> bool {
    let known = ["run.sh", "main.sh", "train.sh", "start.sh"].into_iter().find(|file| folder.has(file));
    if let Some(file) = known {
        guess.commands.push(format!("bash {file}"));
        guess.found.push(format!("a script ({file})"));
    } else if folder.has("Makefile") {
        guess.commands.push("make".to_owned());
        guess.found.push("a Makefile".to_owned());
    } else {
        return false;
    }
    true
}

impl GuessedConfig {
    /// Renders the configuration. `schema` is the path of the JSON Schema for editors.
    pub(super) fn write(&self, schema: &str) -> String {
        let mut text = format!("# yaml-language-server: $schema={schema}\n");
        let _ = writeln!(text, "type: {}\nname: {}\n", self.kind.as_str(), self.name);
        if !self.place.is_empty() {
            let _ = writeln!(text, "{}", self.place);
        }
        text.push_str(
            "# This directory. If it is a git clone, instances clone its remote and apply your changes.\n",
        );
        text.push_str("repos:\n  - .\n");
        if self.kind == ConfigKind::DevEnvironment {
            text.push_str("ide: vscode\n");
        }
        let (head, then) = match self.kind {
            ConfigKind::DevEnvironment => ("init:", [].as_slice()),
            ConfigKind::Task | ConfigKind::Service => ("commands:", self.commands.as_slice()),
        };
        for (at, command) in self.setup.iter().chain(then).enumerate() {
            let head = if at == 0 { format!("{head}\n") } else { String::new() };
            let _ = writeln!(text, "{head}  - {}", quote_yaml(command));
        }
        if let Some(port) = self.port.filter(|_| self.kind == ConfigKind::Service) {
            let _ = writeln!(text, "port: {port}");
        }
        text.push_str("\nresources:\n");
        text.push_str(if self.gpu {
            "  # One GPU of any kind; `gpu: H100:80GB:8` and `gpu: 24GB..` are more precise.\n  gpu: 1\n"
        } else {
            "  # `gpu: 1`, `memory: 16GB..` and `disk: 100GB..` request more.\n  cpu: 1..\n  memory: 0..\n  disk: null\n"
        });
        text
    }
}

/// Quotes a command unless YAML reads it as a plain scalar.
fn quote_yaml(command: &str) -> String {
    let plain = !command.contains(": ")
        && !command.contains(" #")
        && !command.starts_with(['"', '\'', '[', '{', '&', '*', '!', '|', '>', '%', '@', '`']);
    if plain { command.to_owned() } else { format!("'{}'", command.replace('\'', "''")) }
}

#[cfg(test)]
mod tests {
    use windlass_model::config;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> FolderContents {
        FolderContents {
            name: "My Project!".into(),
            files: files.iter().map(|(name, _)| (*name).to_owned()).collect(),
            texts: files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect(),
        }
    }

    /// Checks that the result is a valid configuration of the given kind and contains `parts`.
    #[track_caller]
    fn check(files: &[(&str, &str)], kind: &str, parts: &[&str]) {
        let text = guess(&folder(files), None, None).write(".windlass/schema.json");
        let parsed = config::parse(&text)
            .unwrap_or_else(|problems| panic!("{}", config::render(&problems, "windlass.yml", &text)));
        assert_eq!((parsed.configuration.kind(), parsed.configuration.name()), (kind, Some("my-project")));
        for part in parts {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
    }

    #[test]
    fn project_language_is_detected_from_its_files() {
        let requirements = ("requirements.txt", "numpy\n");
        check(
            &[requirements, ("train.py", "")],
            "task",
            &["pip install -r requirements.txt", "python train.py"],
        );
        check(
            &[("pyproject.toml", "requires-python = \">=3.11\""), ("uv.lock", ""), ("main.py", "")],
            "task",
            &["python: \"3.11\"", "uv sync", "uv run python main.py"],
        );
        let conda = ("environment.yml", "name: lab\ndependencies:\n  - python=3.11\n  - pytorch::torch\n");
        check(
            &[conda, ("train.py", "")],
            "task",
            &[
                "image: condaforge/miniforge3",
                "conda env update --name base --file environment.yml",
                "gpu: 1",
            ],
        );
        check(
            &[("environment.yaml", ""), ("look.ipynb", "")],
            "dev-environment",
            &["init:\n  - conda env update"],
        );
        check(&[("job.py", "")], "task", &["python job.py", "python: \"3.12\""]);
        check(&[("package.json", "{}"), ("yarn.lock", "")], "task", &["image: node:22", "yarn start"]);
        check(&[("Cargo.toml", "")], "task", &["cargo run --release"]);
        check(&[("go.mod", "")], "task", &["go run ."]);
        check(&[("run.sh", "")], "task", &["bash run.sh"]);
        check(&[("Makefile", "")], "task", &["- make"]);
        check(&[], "task", &["replace this"]);
        check(&[("look.ipynb", "")], "dev-environment", &["ide: vscode"]);
    }

    #[test]
    fn required_libraries_determine_gpu_and_port() {
        check(&[("requirements.txt", "torch==2.4\n"), ("train.py", "")], "task", &["gpu: 1"]);
        let service = [("requirements.txt", "fastapi\nuvicorn\n"), ("app.py", "")];
        check(&service, "service", &["uvicorn app:app", "port: 8000"]);
        assert!(!lists_library("torchmetrics-lite\n", "torch") && lists_library("Torch>=2", "torch"));
    }

    #[test]
    fn any_folder_name_yields_a_valid_resource_name() {
        let made = ["train", "My Project!", "2024-runs", "___", "ünï"].map(resource_name);
        assert_eq!(made, ["train", "my-project", "run-2024-runs", "run", "run-n"]);
        assert!(made.iter().all(|name| config::name::is_resource_name(name)), "{made:?}");
        assert!(config::name::is_resource_name(&resource_name(&"x".repeat(200))));
    }
}
