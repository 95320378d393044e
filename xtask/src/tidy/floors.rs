//! Floors of the server: a module imports from its own floor and from those below it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use super::Problems;
use crate::workspace::Workspace;

const SOURCE: &str = "crates/server/src/";
const TABLE_HEAD: &str = "| floor |";

/// Imports that still point upwards. This list only gets shorter.
const KNOWN_UPWARD: &[(&str, &str)] =
    &[("agents", "app"), ("agents", "services"), ("attempt_specs", "services"), ("pipelines", "services")];

/// Pairs of modules that import each other. This number only falls.
const MUTUAL_PAIRS: usize = 13;

/// Which modules import which, with the first file that does.
type Imports = BTreeMap<(String, String), String>;

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let floors = documented_floors(&workspace.read("ARCHITECTURE.md")?)?;
    let files: Vec<String> = workspace
        .files()?
        .into_iter()
        .filter(|path| path.starts_with(SOURCE) && path.ends_with(".rs") && !is_test_file(path))
        .collect();
    let modules: BTreeSet<String> =
        files.iter().map(|path| module_of(path)).filter(|module| module != "lib").collect();
    let mut imports = Imports::new();
    for path in &files {
        let module = module_of(path);
        let tokens: TokenStream =
            workspace.read(path)?.parse().ok().with_context(|| format!("failed to parse `{path}`"))?;
        let mut used = BTreeSet::new();
        collect_imports(tokens, &mut used);
        for other in used.into_iter().filter(|other| *other != module && modules.contains(other)) {
            imports.entry((module.clone(), other)).or_insert_with(|| path.clone());
        }
    }
    imports.retain(|(module, _), _| module != "lib");
    let mut problems = unplaced_modules(&floors, &modules);
    problems.extend(compare(&floors, &imports, KNOWN_UPWARD));
    problems.extend(count_mutual(&imports, MUTUAL_PAIRS));
    Ok(problems)
}

/// Parses rows like ``| `http` | `routes`, `web_ui` | what it knows |``, from the top floor to the lowest. The result is the
/// height of each module.
fn documented_floors(markdown: &str) -> Result<BTreeMap<String, usize>> {
    let rows = markdown.lines().skip_while(|line| !line.starts_with(TABLE_HEAD)).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| line.starts_with('|')).collect();
    ensure!(!rows.is_empty(), "ARCHITECTURE.md has no table of the floors of the server");
    let mut floors = BTreeMap::new();
    for (below, row) in rows.iter().rev().enumerate() {
        let modules =
            row.trim_matches('|').split('|').nth(1).context("a row of the floors has no modules")?;
        for module in modules.split(',').map(|name| name.trim().trim_matches('`')) {
            let before = floors.insert(module.to_owned(), below);
            ensure!(before.is_none(), "`{module}` is on two floors in ARCHITECTURE.md");
        }
    }
    Ok(floors)
}

fn module_of(path: &str) -> String {
    let below = path.strip_prefix(SOURCE).unwrap_or(path);
    let first = below.split('/').next().unwrap_or(below);
    first.strip_suffix(".rs").unwrap_or(first).to_owned()
}

fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.ends_with("_tests.rs") || path.contains("/tests/")
}

/// Collects the first segment of each path that begins with `crate`, without those of test modules.
fn collect_imports(tokens: TokenStream, found: &mut BTreeSet<String>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if is_test_attribute(&tokens[at..]) {
            // The attribute, and the item behind it up to its body or semicolon.
            at += 2;
            while at < tokens.len() && !ends_item(&tokens[at]) {
                at += 1;
            }
        } else if is_word(&tokens[at], "crate") && is_path_separator(&tokens[at + 1..]) {
            match tokens.get(at + 3) {
                Some(TokenTree::Ident(name)) => {
                    found.insert(name.to_string());
                }
                Some(TokenTree::Group(list)) => found.extend(first_names(list)),
                _ => {}
            }
            at += 3;
            continue;
        } else if let TokenTree::Group(group) = &tokens[at] {
            collect_imports(group.stream(), found);
        }
        at += 1;
    }
}

/// The names in `{agents::Agent, db}`: those at its start and behind a comma.
fn first_names(list: &Group) -> Vec<String> {
    let tokens: Vec<TokenTree> = list.stream().into_iter().collect();
    let starts = tokens.iter().enumerate().filter(|(at, _)| {
        *at == 0 || matches!(&tokens[at - 1], TokenTree::Punct(mark) if mark.as_char() == ',')
    });
    let names = starts.filter(|(_, token)| matches!(token, TokenTree::Ident(_)));
    names.map(|(_, name)| name.to_string()).collect()
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(name) if name == word)
}

fn is_path_separator(tokens: &[TokenTree]) -> bool {
    let is_colon = |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ':');
    tokens.len() >= 2 && tokens[..2].iter().all(is_colon)
}

fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let [TokenTree::Punct(mark), TokenTree::Group(attribute), ..] = tokens else { return false };
    mark.as_char() == '#' && attribute.stream().to_string().replace(' ', "") == "cfg(test)"
}

fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(mark) => mark.as_char() == ';',
        TokenTree::Ident(_) | TokenTree::Literal(_) => false,
    }
}

fn unplaced_modules(floors: &BTreeMap<String, usize>, modules: &BTreeSet<String>) -> Problems {
    let unplaced = modules
        .iter()
        .filter(|module| !floors.contains_key(*module))
        .map(|module| format!("module `{module}` of the server is on no floor in ARCHITECTURE.md"));
    let unknown = floors
        .keys()
        .filter(|module| !modules.contains(*module))
        .map(|module| format!("ARCHITECTURE.md names `{module}`, which is no module of the server"));
    unplaced.chain(unknown).collect()
}

fn compare(floors: &BTreeMap<String, usize>, imports: &Imports, known: &[(&str, &str)]) -> Problems {
    let floor = |module: &str| floors.get(module).copied().unwrap_or_default();
    let is_upward = |module: &str, other: &str| floor(module) < floor(other);
    let is_known = |module: &str, other: &str| known.contains(&(module, other));
    let added = imports
        .iter()
        .filter(|((module, other), _)| is_upward(module, other) && !is_known(module, other))
        .map(|((module, other), path)| {
            format!("`{path}`: `{module}` must not import `{other}`, which is above it")
        });
    let gone = known
        .iter()
        .filter(|(module, other)| {
            !is_upward(module, other) || !imports.contains_key(&((*module).to_owned(), (*other).to_owned()))
        })
        .map(|(module, other)| {
            format!("`{module}` no longer imports `{other}` from above: remove it from the list")
        });
    added.chain(gone).collect()
}

fn count_mutual(imports: &Imports, expected: usize) -> Problems {
    let pairs: Vec<String> = imports
        .keys()
        .filter(|(module, other)| module < other && imports.contains_key(&(other.clone(), module.clone())))
        .map(|(module, other)| format!("{module} and {other}"))
        .collect();
    if pairs.len() == expected {
        return Vec::new();
    }
    vec![format!(
        "{} pairs of modules import each other instead of {expected}: {}",
        pairs.len(),
        pairs.join(", ")
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "text\n| floor | modules | knows |\n| --- | --- | --- |\n\
                            | http | `routes` | axum |\n| infra | `agents`, `logs` | no policy |\n\nmore";

    fn imports_of(source: &str) -> Vec<String> {
        let mut found = BTreeSet::new();
        collect_imports(source.parse().unwrap(), &mut found);
        found.into_iter().collect()
    }

    fn imports(list: &[(&str, &str)]) -> Imports {
        let one = |(module, other): &(&str, &str)| {
            (((*module).to_owned(), (*other).to_owned()), format!("{SOURCE}{module}.rs"))
        };
        list.iter().map(one).collect()
    }

    #[test]
    fn imports_are_found_in_lists_and_in_code_but_not_in_tests_comments_or_texts() {
        let source = "use crate::{agents::{Agent, Task}, logs};\n// crate::comment\nfn f() { crate::pipelines::run(\"crate::text\") }\n\
                      #[cfg(test)]\nmod tests { use crate::routes; }\n#[cfg(test)] mod more;\nuse crate::app;";
        assert_eq!(imports_of(source), ["agents", "app", "logs", "pipelines"]);
    }

    #[test]
    fn an_import_from_above_is_refused_unless_it_is_listed_and_a_listed_one_must_exist() {
        let floors = documented_floors(DOCUMENT).unwrap();
        assert!(compare(&floors, &imports(&[("routes", "agents"), ("logs", "agents")]), &[]).is_empty());
        let upward = imports(&[("agents", "routes")]);
        assert_eq!(
            compare(&floors, &upward, &[]),
            ["`crates/server/src/agents.rs`: `agents` must not import `routes`, which is above it"]
        );
        assert!(compare(&floors, &upward, &[("agents", "routes")]).is_empty());
        let gone = compare(&floors, &imports(&[]), &[("agents", "routes")]);
        assert!(gone.len() == 1 && gone[0].contains("remove it"), "{gone:?}");
    }

    #[test]
    fn every_module_is_on_one_floor_and_pairs_are_counted() {
        let floors = documented_floors(DOCUMENT).unwrap();
        let modules = ["agents", "logs", "new"].map(str::to_owned).into();
        assert_eq!(unplaced_modules(&floors, &modules).len(), 2);
        assert!(documented_floors(&DOCUMENT.replace("`logs`", "`routes`")).is_err());
        let pair = imports(&[("agents", "logs"), ("logs", "agents"), ("routes", "logs")]);
        assert!(count_mutual(&pair, 1).is_empty());
        assert_eq!(count_mutual(&pair, 0).len(), 1);
    }
}
