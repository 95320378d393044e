//! Removal of terminal codes from output, piece by piece.
//!
//! Only the output for dstack's servers and clients is stripped; all other readers get the bytes unchanged. The state
//! at any offset follows from the bytes just before it: ESC always starts a new code and no code is longer than
//! [`CODE_MAX`]. So a reader can start anywhere and repeat a read without keeping state.

/// Maximum length of a code that is removed; a longer one is shown.
pub const CODE_MAX: usize = 64 * 1024;

const ESC: u8 = 0x1b;
const BEL: u8 = 0x07;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeStripper {
    state: EscapeState,
    /// Bytes since and including ESC.
    length: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EscapeState {
    #[default]
    Text,
    /// After ESC.
    Escape,
    /// After ESC and intermediate bytes, which precede a final one, as in `ESC ( B`.
    Intermediate,
    /// `ESC [ … final`.
    Control,
    /// A string up to BEL or ST: `ESC ] …`, and `ESC P`, `ESC X`, `ESC ^`, `ESC _` with their payloads.
    String,
}

impl CodeStripper {
    /// Returns the state after `before`: the preceding bytes, at least [`CODE_MAX`] of them or all.
    pub fn after(before: &[u8]) -> Self {
        let recent = &before[before.len().saturating_sub(CODE_MAX)..];
        let mut stripper = Self::default();
        if let Some(escape) = recent.iter().rposition(|byte| *byte == ESC) {
            recent[escape..].iter().for_each(|byte| _ = stripper.is_visible(*byte));
        }
        stripper
    }

    /// Keeps the visible part of `bytes`.
    pub fn strip(&mut self, bytes: &mut Vec<u8>) {
        bytes.retain(|byte| self.is_visible(*byte));
    }

    fn is_visible(&mut self, byte: u8) -> bool {
        if byte == ESC {
            *self = Self { state: EscapeState::Escape, length: 1 };
            return false;
        }
        if self.state == EscapeState::Text {
            return true;
        }
        self.length += 1;
        if self.length > CODE_MAX {
            self.state = EscapeState::Text;
            return true;
        }
        let (next, shows) = step(self.state, byte);
        self.state = next;
        shows
    }
}

/// Returns the next state after a byte inside a code. A byte that cannot be part of it ends it and is shown.
fn step(state: EscapeState, byte: u8) -> (EscapeState, bool) {
    match (state, byte) {
        (EscapeState::Text, _) => (EscapeState::Text, true),
        (EscapeState::Escape, b'[') => (EscapeState::Control, false),
        (EscapeState::Escape, b']' | b'P' | b'X' | b'^' | b'_') => (EscapeState::String, false),
        (EscapeState::Escape | EscapeState::Intermediate, 0x20..=0x2f) => (EscapeState::Intermediate, false),
        (EscapeState::Escape | EscapeState::Intermediate, 0x30..=0x7e) => (EscapeState::Text, false),
        (EscapeState::Escape | EscapeState::Intermediate, _) => (EscapeState::Text, true),
        (EscapeState::Control, 0x20..=0x3f) => (EscapeState::Control, false),
        (EscapeState::Control, 0x40..=0x7e) => (EscapeState::Text, false),
        (EscapeState::Control, _) => (EscapeState::Text, true),
        (EscapeState::String, BEL) => (EscapeState::Text, false),
        // An unterminated string costs its line, not the rest of the output.
        (EscapeState::String, b'\n') => (EscapeState::Text, true),
        (EscapeState::String, _) => (EscapeState::String, false),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stripped(bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.to_vec();
        CodeStripper::default().strip(&mut out);
        out
    }

    #[track_caller]
    fn check(raw: &str, shows: &str) {
        assert_eq!(String::from_utf8(stripped(raw.as_bytes())).unwrap(), shows, "{raw:?}");
    }

    #[test]
    fn terminal_codes_are_stripped_and_text_is_kept() {
        check("plain\r\n\ttext\n", "plain\r\n\ttext\n");
        check("\x1b[31mred\x1b[0m", "red");
        check("\x1b[38;5;196mdeep\x1b[m red", "deep red");
        check("a\x1b[2Kb\x1b[1Ac\x1b[?25l\x1b[?25h", "abc");
        check("\x1b]0;a title\x07after", "after");
        check("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link");
        check("\x1bPq#0;2;0;0;0\x1b\\image", "image");
        check("\x1b(Bascii\x1b)0\x1b7\x1b8\x1bc\x1b=\x1b>", "ascii");
        check("grüße 10% ✓ \x1b[1mfett\x1b[22m", "grüße 10% ✓ fett");
        check("\x1b\x1b[31mtwice", "twice");
        check("\x1b[31", "");
    }

    #[test]
    fn a_malformed_terminal_code_does_not_swallow_the_text_after_it() {
        check("\x1b[31\nnext", "\nnext");
        check("\x1b[3\u{fc}x", "\u{fc}x");
        check("\x1b]never ended\nnext line\n", "\nnext line\n");
        check("\x1b\nx", "\nx");
    }

    #[test]
    fn an_unterminated_terminal_code_ends_at_the_length_limit() {
        let mut raw = b"\x1b]".to_vec();
        raw.resize(CODE_MAX + 3, b'x');
        assert_eq!(stripped(&raw), b"xxx");
    }

    proptest! {
        /// However the bytes are split, and even if each piece starts only from the bytes before it.
        #[test]
        fn stripping_in_pieces_equals_stripping_the_whole(
            raw in proptest::collection::vec(prop::sample::select(b"\x1b\x1b[]P()0;mAB\x07\\\n\xc3\xbcx ".to_vec()), 0..200),
            cuts in proptest::collection::vec(0usize..200, 0..8),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(raw.len())).collect();
            cuts.extend([0, raw.len()]);
            cuts.sort_unstable();
            let mut out = Vec::new();
            for piece in cuts.windows(2) {
                let mut bytes = raw[piece[0]..piece[1]].to_vec();
                CodeStripper::after(&raw[..piece[0]]).strip(&mut bytes);
                out.extend(bytes);
            }
            prop_assert_eq!(out, stripped(&raw));
        }
    }
}
