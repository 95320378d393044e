//! Charts as SVG: a row of panels with logarithmic axes and labelled points.

use std::fmt::Write;

/// One measured quantity, with up to three lines.
pub struct Panel {
    pub title: &'static str,
    pub unit: &'static str,
    pub lines: Vec<PlotLine>,
}

pub struct PlotLine {
    /// Label of the last point; empty if there is only one line.
    pub name: &'static str,
    pub points: Vec<(f64, f64)>,
}

const COLOURS: [&str; 3] = ["#1f6feb", "#bc4c00", "#1a7f37"];
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 44.0;
const TOP: f64 = 46.0;
const BOTTOM: f64 = 42.0;
const HEAD: f64 = 34.0;

/// Renders panels side by side, with the same `across` axis.
pub fn render_svg(title: &str, across: &str, panels: &[Panel]) -> String {
    let (width, height) = (WIDTH * panels.len() as f64, HEIGHT + HEAD);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"system-ui, sans-serif\" font-size=\"11\" fill=\"#1f2328\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"15\" font-weight=\"600\">{title}</text>\n"
    );
    for (number, panel) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate({} {HEAD})\">", number as f64 * WIDTH);
        draw_panel(&mut out, panel, across);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// A logarithmic axis over whole decades.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    first: i32,
    last: i32,
    from: f64,
    to: f64,
}

impl Axis {
    fn covering(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let logs = values.filter(|value| *value > 0.0).map(f64::log10);
        let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        if low > high {
            return Self { first: 0, last: 1, from, to };
        }
        let (first, last) = (low.floor() as i32, high.ceil() as i32);
        Self { first, last: last.max(first + 1), from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let span = f64::from(self.last - self.first);
        let part = (value.max(f64::MIN_POSITIVE).log10() - f64::from(self.first)) / span;
        self.from + (self.to - self.from) * part.clamp(0.0, 1.0)
    }

    /// Decades, with intermediate marks if there are few.
    fn marks(&self) -> Vec<f64> {
        let between: &[f64] = if self.last - self.first > 2 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = self.decades().flat_map(|decade| between.iter().map(move |times| decade * times));
        all.filter(|value| *value <= 10_f64.powi(self.last)).collect()
    }

    fn decades(&self) -> impl Iterator<Item = f64> + use<> {
        (self.first..=self.last).map(|power| 10_f64.powi(power))
    }
}

fn draw_panel(out: &mut String, panel: &Panel, across: &str) {
    let points = || panel.lines.iter().flat_map(|line| line.points.iter());
    let x = Axis::covering(points().map(|point| point.0), LEFT, WIDTH - RIGHT);
    let y = Axis::covering(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"20\" font-size=\"12\" font-weight=\"600\">{}</text>\n\
         <text x=\"{LEFT}\" y=\"34\" fill=\"#59636e\">{}</text>",
        panel.title, panel.unit
    );
    for value in y.marks() {
        let at = y.at(value);
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#d8dee4\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#59636e\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            format_short(value)
        );
    }
    for value in x.decades() {
        let at = x.at(value);
        let _ = writeln!(
            out,
            "<path d=\"M{at:.1} {:.1}v5\" stroke=\"#59636e\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#59636e\">{}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 17.0,
            format_short(value)
        );
    }
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {:.1}H{:.1}\" stroke=\"#59636e\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#59636e\">{across}</text>",
        HEIGHT - BOTTOM,
        WIDTH - RIGHT,
        f64::midpoint(LEFT, WIDTH - RIGHT),
        HEIGHT - 8.0
    );
    for (number, line) in panel.lines.iter().enumerate() {
        // Labels of the upper line are above it, those of the lower below.
        draw_line(out, line, COLOURS[number % COLOURS.len()], number > 0, (x, y));
    }
}

fn draw_line(out: &mut String, line: &PlotLine, colour: &str, below: bool, (x, y): (Axis, Axis)) {
    let mut path = String::new();
    for (number, (across, up)) in line.points.iter().enumerate() {
        let step = if number == 0 { 'M' } else { 'L' };
        let _ = write!(path, "{step}{:.1} {:.1}", x.at(*across), y.at(*up));
    }
    let _ = writeln!(out, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
    let offset = if below { 16.0 } else { -8.0 };
    for (across, up) in &line.points {
        let (at, high) = (x.at(*across), y.at(*up));
        // Labels never overlap the axis and its numbers.
        let text = if high + offset > HEIGHT - BOTTOM - 3.0 { high - 8.0 } else { high + offset };
        let _ = writeln!(
            out,
            "<circle cx=\"{at:.1}\" cy=\"{high:.1}\" r=\"3\" fill=\"{colour}\"/>\
             <text x=\"{at:.1}\" y=\"{text:.1}\" text-anchor=\"middle\" fill=\"{colour}\">{}</text>",
            format_short(*up)
        );
    }
    if let Some((across, up)) = line.points.last().filter(|_| !line.name.is_empty()) {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" font-weight=\"600\">{}</text>",
            x.at(*across) + 8.0,
            y.at(*up) + 4.0,
            line.name
        );
    }
}

/// Formats two or three significant digits.
fn format_short(value: f64) -> String {
    let plain = |value: f64| {
        let digits = if value >= 100.0 { 0 } else { 2 - (value.log10().floor() as i32).clamp(-1, 1) };
        let text = format!("{value:.*}", usize::try_from(digits).unwrap_or(0));
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    match value {
        value if value <= 0.0 => "0".to_owned(),
        value if value >= 1e6 => format!("{} M", plain(value / 1e6)),
        value if value >= 1e4 => format!("{} k", plain(value / 1e3)),
        value => plain(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_formatted_with_significant_digits_only() {
        let written =
            [0.004, 0.012, 0.57, 1.0, 3.25, 47.6, 100.0, 2_000.0, 10_000.0, 123_456.0].map(format_short);
        assert_eq!(written, ["0.004", "0.012", "0.57", "1", "3.25", "47.6", "100", "2000", "10 k", "123 k"]);
    }

    #[test]
    fn an_axis_covers_whole_decades_and_at_least_one() {
        let axis = Axis::covering([120.0, 80_000.0].into_iter(), 0.0, 300.0);
        assert_eq!((axis.first, axis.last), (2, 5));
        assert!((axis.at(1_000.0) - 100.0).abs() < 1e-9);
        assert_eq!(Axis::covering([10.0].into_iter(), 0.0, 1.0).decades().count(), 2);
        assert_eq!(Axis::covering(std::iter::empty(), 0.0, 1.0).decades().count(), 2);
    }

    #[test]
    fn plot_draws_every_point_and_names_each_line() {
        let lines = vec![PlotLine { name: "p50", points: vec![(1.0, 0.5), (2_000.0, 700.0)] }];
        let picture = render_svg("Growth", "hosts", &[Panel { title: "time", unit: "ms", lines }]);
        assert_eq!(picture.matches("<circle").count(), 2);
        assert!(picture.contains(">700<") && picture.contains(">p50<") && picture.ends_with("</svg>\n"));
    }
}
