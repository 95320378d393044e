//! Renders a terminal screen as SVG, with its colours.

use std::fmt::Write as _;

const WIDTH: f64 = 8.4;
const HEIGHT: f64 = 19.0;
const MARGIN: f64 = 16.0;
const BACKGROUND_COLOUR: &str = "#1b1f27";
const TEXT_COLOUR: &str = "#d8dee9";
/// Black to white, as on a dark terminal.
const COLOURS: [&str; 8] =
    ["#4c566a", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d8dee9"];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TextStyle {
    colour: Option<usize>,
    bold: bool,
    dim: bool,
}

impl TextStyle {
    /// Applies the parameters of `ESC [ … m`; unknown ones are ignored.
    fn apply(&mut self, numbers: &str) {
        for number in numbers.split(';') {
            match number.parse().unwrap_or(0_usize) {
                0 => *self = Self::default(),
                1 => self.bold = true,
                2 => self.dim = true,
                22 => (self.bold, self.dim) = (false, false),
                39 => self.colour = None,
                colour @ 30..=37 => self.colour = Some(colour - 30),
                colour @ 90..=97 => self.colour = Some(colour - 90),
                _ => {}
            }
        }
    }

    fn style(self) -> String {
        let mut style = format!("fill=\"{}\"", self.colour.map_or(TEXT_COLOUR, |colour| COLOURS[colour]));
        if self.bold {
            style.push_str(" font-weight=\"bold\"");
        }
        if self.dim {
            style.push_str(" opacity=\"0.6\"");
        }
        style
    }
}

/// `screen` is text with colour sequences.
pub(super) fn render_svg(screen: &str, columns: usize) -> String {
    let lines: Vec<&str> = screen.lines().collect();
    #[expect(clippy::cast_precision_loss, reason = "a screen has some hundred lines and columns")]
    let (width, height) = (columns as f64 * WIDTH + 2.0 * MARGIN, lines.len() as f64 * HEIGHT + 2.0 * MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\">\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{BACKGROUND_COLOUR}\"/>\n\
         <g font-family=\"ui-monospace, Menlo, Consolas, monospace\" font-size=\"14\">\n<style>text{{white-space:pre}}</style>\n"
    );
    let mut pen = TextStyle::default();
    let mut y = MARGIN + HEIGHT * 0.75;
    for line in lines {
        let spans = parse_spans(line, &mut pen);
        if !spans.is_empty() {
            let _ = writeln!(out, "<text x=\"{MARGIN}\" y=\"{y:.1}\">{spans}</text>");
        }
        y += HEIGHT;
    }
    out.push_str("</g>\n</svg>\n");
    out
}

fn parse_spans(line: &str, pen: &mut TextStyle) -> String {
    let mut out = String::new();
    let mut parts = line.split("\u{1b}[");
    let mut put = |text: &str, pen: TextStyle| {
        if !text.is_empty() {
            let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let _ = write!(out, "<tspan {}>{text}</tspan>", pen.style());
        }
    };
    put(parts.next().unwrap_or_default(), *pen);
    for part in parts {
        let (numbers, text) = part.split_once('m').unwrap_or(("", part));
        pen.apply(numbers);
        put(text, *pen);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_become_spans_and_text_is_escaped() {
        let mut pen = TextStyle::default();
        let drawn = parse_spans("a<b \u{1b}[1;32mok\u{1b}[0m!", &mut pen);
        assert_eq!(
            drawn,
            "<tspan fill=\"#d8dee9\">a&lt;b </tspan><tspan fill=\"#98c379\" font-weight=\"bold\">ok</tspan>\
             <tspan fill=\"#d8dee9\">!</tspan>"
        );
        assert_eq!(pen, TextStyle::default());
    }

    #[test]
    fn a_colour_continues_on_the_next_line() {
        let drawn = render_svg("\u{1b}[31mone\ntwo", 10);
        assert_eq!(drawn.matches("fill=\"#e06c75\"").count(), 2, "{drawn}");
    }
}
