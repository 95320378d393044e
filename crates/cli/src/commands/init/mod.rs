//! `windlass init`: inspects a directory and writes a configuration that runs its content.

mod guess;

use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use ignore::WalkBuilder;
use serde_json::json;
use windlass_model::config::name::is_resource_name;

use self::guess::{ConfigKind, FolderContents, GuessedConfig};
use super::apply::DEFAULT_FILES;
use crate::{
    cli::OutputArgs,
    error::{CliError, ErrorCode},
    exit::Exit,
    output,
};

/// JSON Schema with which editors validate configurations.
const SCHEMA: &str = include_str!("../../../../../schema/windlass.schema.json");
/// Relative to the configuration, so that the path is the same on every machine.
const SCHEMA_FILE: &str = ".windlass/schema.json";
/// Limits of the scan, which reads only the top of a directory tree.
const FILES_MAX: usize = 2000;
const DEPTH_MAX: usize = 2;
const TEXT_BYTES_MAX: u64 = 256 << 10;
const READ_FILES: [&str; 6] = [
    "requirements.txt",
    "pyproject.toml",
    "setup.py",
    "environment.yml",
    "environment.yaml",
    ".python-version",
];

const EXAMPLES: &str = "\
Examples:
  windlass init                          inspect this directory and write `windlass.yml`
  windlass init --type service code/     write a service for the content of `code`
  windlass init --stdout                 only print the configuration
  windlass apply                         run the configuration";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory to inspect and to write to
    #[arg(value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Name; defaults to the name of the directory
    #[arg(short, long, value_name = "NAME")]
    name: Option<String>,
    /// Type of the configuration; detected by default
    #[arg(short, long = "type", value_enum, value_name = "TYPE")]
    kind: Option<ConfigKind>,
    /// Print the configuration instead of writing it
    #[arg(long)]
    stdout: bool,
    /// Overwrite an existing configuration
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    if let Some(name) = args.name.as_deref().filter(|name| !is_resource_name(name)) {
        return Err(CliError::usage(format!("invalid name `{name}`")).hint(
            "use 2 to 41 lower-case letters, digits and dashes, starting with a letter: `-n my-task`",
        ));
    }
    let folder = read_folder(&args.dir)?;
    let guess = guess::guess(&folder, args.kind, args.name.as_deref());
    let text = guess.write(SCHEMA_FILE);
    if args.stdout {
        output::print_data(text.trim_end());
        return Ok(Exit::Done);
    }
    let file = write(args, &text)?;
    print_summary(args, &file, &guess)?;
    Ok(Exit::Done)
}

fn read_folder(dir: &Path) -> Result<FolderContents, CliError> {
    let failed =
        |error: std::io::Error| CliError::from_error(&format!("failed to read `{}`", dir.display()), &error);
    let whole = std::fs::canonicalize(dir).map_err(failed)?;
    if !whole.is_dir() {
        return Err(CliError::usage(format!("`{}` is not a directory", dir.display()))
            .hint("run `windlass init DIR`"));
    }
    let name = whole.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut folder = FolderContents { name, ..FolderContents::default() };
    let walk = WalkBuilder::new(&whole).max_depth(Some(DEPTH_MAX)).require_git(false).build();
    let files = walk.flatten().filter(|entry| entry.file_type().is_some_and(|kind| kind.is_file()));
    for entry in files.take(FILES_MAX) {
        if let Ok(path) = entry.path().strip_prefix(&whole) {
            folder.files.push(path.to_string_lossy().into_owned());
        }
    }
    folder.files.sort();
    for name in READ_FILES {
        if let Ok(file) = std::fs::File::open(whole.join(name)) {
            let mut text = Vec::new();
            file.take(TEXT_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
            folder.texts.insert(name.to_owned(), String::from_utf8_lossy(&text).into_owned());
        }
    }
    Ok(folder)
}

fn write(args: &Args, text: &str) -> Result<PathBuf, CliError> {
    let there = DEFAULT_FILES.iter().map(|name| args.dir.join(name)).find(|path| path.exists());
    let file = match there {
        Some(there) if !args.force => {
            return Err(CliError::new(format!("cannot write a configuration to `{}`", args.dir.display()))
                .code(ErrorCode::Usage)
                .why(format!("`{}` already exists", there.display()))
                .hint("use `--force` to replace it, or `--stdout` to only print a configuration"));
        }
        Some(there) => there,
        None => args.dir.join(DEFAULT_FILES[0]),
    };
    let schema = args.dir.join(SCHEMA_FILE);
    let put = |path: &Path, text: &str| {
        let parent = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        parent
            .and_then(|()| std::fs::write(path, text))
            .map_err(|error| CliError::from_error(&format!("failed to write `{}`", path.display()), &error))
    };
    put(&schema, SCHEMA)?;
    put(&file, text)?;
    // `./windlass.yml` is `windlass.yml`.
    Ok(file.strip_prefix(".").map(Path::to_owned).unwrap_or(file))
}

fn print_summary(args: &Args, file: &Path, guess: &GuessedConfig) -> Result<(), CliError> {
    let shown = output::printable(&file.display().to_string());
    for found in &guess.found {
        output::print_message(&output::printable(&format!("Found {found}.")));
    }
    output::print_message(&format!(
        "Wrote {shown}: a {} `{}`. Review it, then run `windlass apply -f {shown}`.",
        guess.kind.as_str(),
        guess.name
    ));
    let document = json!({
        "file": shown,
        "type": guess.kind.as_str(),
        "name": guess.name,
        "found": guess.found,
    });
    output::print_one(args.output.format, &document, &shown, |_| output::print_data(&shown))
}
