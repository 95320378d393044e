//! Test of the performance page.

use std::path::Path;

use windlass_bench::report;

#[test]
fn performance_page_matches_the_stored_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (page, filled) = report::compare(&root).unwrap();
    assert!(page == filled, "docs/performance.md is not what its results make it: cargo xtask bench report");
}
