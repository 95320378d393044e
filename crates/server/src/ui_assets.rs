//! Files of the web UI, which are part of the binary, and their version.

#[expect(unreachable_pub, reason = "the generated file is written for any module")]
mod dist {
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../web/dist/assets.rs"));
}

pub(crate) use self::dist::{ASSETS, Asset};

/// Name of the entry script, which changes with every build of the UI.
pub(crate) const VERSION: &str = dist::VERSION;
