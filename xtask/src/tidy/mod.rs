//! Rules that a program can check. Each is a function that lists the problems, and a test.
//!
//! A rule in this module needs no paragraph in a guide. `cargo xtask tidy` runs all rules and prints every problem; the
//! tests below run them one by one.

pub(crate) mod advisories;
mod crate_edges;
mod documents;
mod findings;
mod floors;
mod json_columns;
mod licences;
mod pipelines;
mod security;
mod sources;
mod words;

use anyhow::{Result, ensure};

use crate::{output, workspace::Workspace};

/// Problems, one line each; empty if there are none.
type Problems = Vec<String>;

type Check = fn(&Workspace) -> Result<Problems>;

const CHECKS: &[(&str, Check)] = &[
    ("dependencies between crates follow the table of ARCHITECTURE.md", crate_edges::check),
    ("modules of the server import only from their floor and below", floors::check),
    ("modules have descriptive names", sources::check_names),
    ("types and comments use plain words", words::check),
    ("source files are not too long", sources::check_lengths),
    ("SQL is only in the crate db", sources::check_sql_location),
    ("the database code uses neither the network nor the layers above it", sources::check_db_dependencies),
    ("tests are enabled and have descriptive names", sources::check_tests_enabled),
    ("JSON columns are decoded with their table and row", json_columns::check),
    ("pipelines document what they claim, own and wait for", pipelines::check),
    ("decision records have all headings", documents::check_decisions),
    ("README and .ci/run name the same commands", documents::check_readme_commands),
    ("the status table names tests that exist", documents::check_status_table),
    ("no file mentions the environment it was written in", documents::check_work_paths),
    ("links between documents are valid", documents::check_links),
    ("every dependency has a documented reason", documents::check_dependencies),
    ("every licence is permissive", licences::check),
    ("no dependency has a known vulnerability without a reason", advisories::check),
    ("every attack is listed with its tests", security::check_attacks),
    ("every finding of a review is listed with its tests", findings::check),
    ("unsafe code is only in the listed crates", security::check_unsafe_code),
    ("programs are started without a shell", security::check_shells),
];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut found = 0;
    for (name, check) in CHECKS {
        let problems = check(workspace)?;
        output::print_message(&format!("{} {name}", if problems.is_empty() { "ok    " } else { "FAILED" }));
        for problem in &problems {
            output::print_message(&format!("         {problem}"));
        }
        found += problems.len();
    }
    ensure!(found == 0, "{found} problems");
    Ok(())
}

/// Configurations under `examples/`.
pub(crate) fn check_examples(files: &[String]) -> Vec<&str> {
    let is_yaml = |path: &&str| path.ends_with(".yml") || path.ends_with(".yaml");
    files.iter().map(String::as_str).filter(|path| path.starts_with("examples/")).filter(is_yaml).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn holds(check: Check) {
        let workspace = Workspace::find().unwrap();
        let problems = check(&workspace).unwrap();
        assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    }

    #[test]
    fn crate_dependencies_are_listed_in_architecture_md() {
        holds(crate_edges::check);
    }

    #[test]
    fn modules_of_the_server_import_only_from_their_floor_and_below() {
        holds(floors::check);
    }

    #[test]
    fn modules_have_descriptive_names() {
        holds(sources::check_names);
    }

    #[test]
    fn types_and_comments_use_plain_words() {
        holds(words::check);
    }

    #[test]
    fn source_files_stay_within_the_line_limit() {
        holds(sources::check_lengths);
    }

    #[test]
    fn sql_is_confined_to_the_db_module() {
        holds(sources::check_sql_location);
    }

    #[test]
    fn json_columns_are_decoded_with_their_table_and_row() {
        holds(json_columns::check);
    }

    #[test]
    fn l15_db_module_makes_no_network_calls() {
        holds(sources::check_db_dependencies);
    }

    #[test]
    fn tests_are_enabled_and_have_descriptive_names() {
        holds(sources::check_tests_enabled);
    }

    #[test]
    fn every_attack_is_listed_with_its_tests() {
        holds(security::check_attacks);
    }

    #[test]
    fn every_finding_of_a_review_is_listed_with_its_tests() {
        holds(findings::check);
    }

    #[test]
    fn unsafe_code_is_only_in_listed_crates() {
        holds(security::check_unsafe_code);
    }

    #[test]
    fn programs_are_started_without_a_shell() {
        holds(security::check_shells);
    }

    #[test]
    fn every_example_is_valid() {
        let workspace = Workspace::find().unwrap();
        let files = workspace.files().unwrap();
        let examples = check_examples(&files);
        assert!(examples.contains(&"examples/hello.yml"), "the demo starts with it");
        for path in examples {
            let text = workspace.read(path).unwrap();
            if let Err(problems) = windlass_model::config::parse(&text) {
                panic!("\n{}", windlass_model::config::render(&problems, path, &text));
            }
        }
    }

    #[test]
    fn every_configuration_in_the_documentation_is_valid() {
        let workspace = Workspace::find().unwrap();
        let is_page = |path: &&String| path.starts_with("docs/") && path.ends_with(".md");
        let (mut wrong, mut number) = (Vec::new(), 0);
        // The pages of errors show invalid ones.
        for path in
            workspace.files().unwrap().iter().filter(is_page).filter(|path| !path.starts_with("docs/errors/"))
        {
            let page = workspace.read(path).unwrap();
            for block in page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
                if !block.lines().any(|line| line.starts_with("type: ")) {
                    continue;
                }
                number += 1;
                if let Err(problems) = windlass_model::config::parse(block) {
                    wrong.push(windlass_model::config::render(&problems, path, block));
                }
            }
        }
        assert!(number > 8, "only {number} configurations were found");
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    }

    #[test]
    fn every_configuration_error_has_a_page_with_a_matching_example() {
        let workspace = Workspace::find().unwrap();
        let mut wrong = Vec::new();
        for code in windlass_model::config::error::Code::ALL {
            let page = workspace.read(&format!("docs/errors/{}.md", code.id())).unwrap();
            for heading in ["## What happened", "## Why", "## What to do"] {
                assert!(page.lines().any(|line| line == heading), "{} has no `{heading}`", code.id());
            }
            assert!(page.starts_with(&format!("# {}: {}\n", code.id(), code.name())));
            let example = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
            let problems = windlass_model::config::parse(example).err().unwrap_or_default();
            let shown: Vec<_> = problems.iter().map(|problem| problem.code).collect();
            if !shown.contains(&code) {
                wrong.push(format!("the example of {} shows {shown:?}", code.id()));
            }
        }
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    }

    #[test]
    fn pipelines_document_what_they_claim_own_and_wait_for() {
        holds(pipelines::check);
    }

    #[test]
    fn decision_records_have_the_required_headings() {
        holds(documents::check_decisions);
    }

    #[test]
    fn readme_and_ci_name_the_same_commands() {
        holds(documents::check_readme_commands);
    }

    #[test]
    fn no_file_mentions_paths_or_documents_outside_the_repository() {
        holds(documents::check_work_paths);
    }

    #[test]
    fn the_status_table_names_tests_that_exist() {
        holds(documents::check_status_table);
    }

    #[test]
    fn links_between_documents_are_not_broken() {
        holds(documents::check_links);
    }

    #[test]
    fn every_dependency_has_a_documented_reason() {
        holds(documents::check_dependencies);
    }

    #[test]
    fn every_licence_is_permissive() {
        holds(licences::check);
    }

    #[test]
    fn no_known_vulnerability_is_linked_in_without_a_documented_reason() {
        holds(advisories::check);
    }

    #[test]
    fn every_check_has_a_test() {
        let source = include_str!("mod.rs");
        let tested = source.matches("holds(").count() - 2;
        assert_eq!(tested, CHECKS.len());
    }
}
