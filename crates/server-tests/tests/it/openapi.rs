//! The OpenAPI document: up to date with the code, complete and correct.

use std::{collections::BTreeSet, path::PathBuf};

use windlass_api::{openapi, operations, rights};
use windlass_server::routes;

fn stored_document_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/api/openapi.json")
}

#[test]
fn stored_openapi_document_matches_the_generated_one() {
    let generated = openapi::render();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(stored_document_path().parent().unwrap()).unwrap();
        std::fs::write(stored_document_path(), &generated).unwrap();
    }
    let have = std::fs::read_to_string(stored_document_path()).unwrap_or_default();
    assert!(have == generated, "docs/api/openapi.json is out of date; run this test with UPDATE=1");
}

#[test]
fn stored_rights_table_matches_the_generated_one() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/rights.md");
    let generated = rights::render_page();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let have = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(have == generated, "docs/reference/rights.md is out of date; run this test with UPDATE=1");
}

#[test]
fn every_operation_has_a_handler_and_every_handler_an_operation() {
    let routes = routes::all_routes();
    let have: BTreeSet<&str> = routes.ids().iter().copied().collect();
    let want: BTreeSet<&str> = operations::table().iter().map(|entry| entry.id).collect();
    assert_eq!(have, want);
    assert_eq!(routes.ids().len(), have.len(), "a handler is mounted twice");
}
