//! Nesting depth of JSON texts. Documents are stored as they are and parsed later, so one that could not be parsed then
//! is rejected before any other processing.

/// Windlass's documents have a dozen levels. Parsers fail at 128, and a document is also parsed as a part of larger
/// ones.
const LEVELS_MAX: usize = 100;
pub(super) const TOO_DEEP: &str = "nested too deeply: the maximum is 100 levels";

/// Returns whether lists and objects of a JSON text are nested too deeply. The result for an invalid text is arbitrary.
pub(super) fn is_too_deep(body: &[u8]) -> bool {
    let (mut levels, mut in_text, mut is_escaped) = (0_usize, false, false);
    for byte in body {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_text => is_escaped = true,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' => levels += 1,
            b']' | b'}' => levels = levels.saturating_sub(1),
            _ => {}
        }
        if levels > LEVELS_MAX {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nested(levels: usize) -> String {
        format!("{}1{}", "[".repeat(levels), "]".repeat(levels))
    }

    #[test]
    fn json_depth_is_limited_and_brackets_in_strings_do_not_count() {
        assert!(!is_too_deep(nested(LEVELS_MAX).as_bytes()));
        assert!(is_too_deep(nested(LEVELS_MAX + 1).as_bytes()));
        assert!(is_too_deep("{\"a\":".repeat(LEVELS_MAX + 1).as_bytes()));
        assert!(!is_too_deep(format!("[\"{}\"]", "[".repeat(1000)).as_bytes()));
        assert!(!is_too_deep(format!("[\"\\\"{}\"]", "[".repeat(1000)).as_bytes()), "an escaped quote");
        assert!(!is_too_deep("[],".repeat(1000).as_bytes()), "side by side");
    }

    proptest! {
        #[test]
        fn fuzz_of_json_depths(body in prop::collection::vec(any::<u8>(), 0..300)) {
            // A text that can be parsed is not rejected.
            if serde_json::from_slice::<serde_json::Value>(&body).is_ok() {
                prop_assert!(!is_too_deep(&body));
            }
        }
    }
}
