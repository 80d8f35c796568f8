//! The loss curve and the step times of all ranks as SVG.

use std::fmt::Write;

const WIDTH: f64 = 800.0;
/// Of the losses; the step times are below.
const HEIGHT: f64 = 420.0;
const TIMES_HEIGHT: f64 = 150.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;

/// The most points of a line of step times: about one per pixel.
const TIME_POINTS: usize = 700;

/// The most ranks with a name: there is no room for more next to the title of the times.
const RANK_NAMES: usize = 10;

/// What is drawn. Losses are (number of steps, loss).
pub(crate) struct Curves<'a> {
    pub(crate) losses: &'a [(u64, f64)],
    pub(crate) held_out: &'a [(u64, f64)],
    pub(crate) unigram: f64,
    /// Milliseconds of every rank by step.
    pub(crate) times: &'a [(u64, Vec<f64>)],
}

impl Curves<'_> {
    /// Draws the training losses, the held-out losses and the unigram loss, with a logarithmic axis if `log` is set, and below them the
    /// step times of all ranks.
    pub(crate) fn svg(&self, title: &str, log: bool) -> String {
        let Curves { losses, held_out, unigram, .. } = *self;
        let all = losses.iter().map(|&(_, loss)| loss).chain(held_out.iter().map(|&(_, loss)| loss)).chain([unigram]);
        // A logarithmic axis has no place for zero; nobody needs to see losses below a millionth.
        let scaled = |loss: f64| if log { loss.max(1e-6).log10() } else { loss };
        let (low, high) =
            all.filter(|x| x.is_finite()).map(scaled).fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)));
        let unit = tick((high - low).max(1e-3));
        let (low, high) = ((low / unit).floor() * unit, (high / unit).ceil() * unit);
        let steps = losses.last().map_or(0, |&(step, _)| step).max(2) as f64;
        let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * step / steps;
        let y = |loss: f64| TOP + (HEIGHT - TOP - BOTTOM) * (high - scaled(loss)) / (high - low);
        let total = if self.times.is_empty() { HEIGHT } else { HEIGHT + TIMES_HEIGHT };
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {total}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{}</text>\n",
            escaped(title)
        );
        let mut add = |text: String| writeln!(svg, "{text}").expect("a string can be written to");
        let mut level = low;
        while level <= high + unit / 2.0 {
            let loss = if log { 10f64.powf(level) } else { level };
            let at = y(loss);
            add(format!("<path d=\"M{LEFT} {at:.1}H{}\" stroke=\"#ddd\"/>", WIDTH - RIGHT));
            add(format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{loss:.2}</text>", LEFT - 6.0, at + 4.0));
            level += unit;
        }
        let every = tick(steps).max(1.0);
        let mut step = 0.0;
        while step <= steps {
            let (at, below) = (x(step), HEIGHT - BOTTOM + 18.0);
            add(format!("<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{step}</text>"));
            step += every;
        }
        add(format!("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>", WIDTH / 2.0, HEIGHT - 12.0));
        let line = |points: &mut dyn Iterator<Item = (f64, f64)>| {
            let points = points.filter(|(_, loss)| loss.is_finite()).map(|(s, l)| format!("{:.1},{:.1}", x(s), y(l)));
            points.collect::<Vec<_>>().join(" ")
        };
        let guess = line(&mut [(0.0, unigram), (steps, unigram)].into_iter());
        add(format!("<polyline points=\"{guess}\" fill=\"none\" stroke=\"#999\" stroke-dasharray=\"5 4\"/>"));
        let trained = line(&mut losses.iter().map(|&(step, loss)| (step as f64, loss)));
        add(format!("<polyline points=\"{trained}\" fill=\"none\" stroke=\"#1f77b4\" stroke-width=\"1.2\"/>"));
        let tested = line(&mut held_out.iter().map(|&(step, loss)| (step as f64, loss)));
        add(format!("<polyline points=\"{tested}\" fill=\"none\" stroke=\"#d62728\" stroke-width=\"2\"/>"));
        // A short run has one held-out loss, which a line would not show.
        for &(step, loss) in held_out.iter().filter(|(_, loss)| loss.is_finite()) {
            add(format!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"#d62728\"/>", x(step as f64), y(loss)));
        }
        for (i, (color, name)) in
            [("#1f77b4", "training"), ("#d62728", "held-out text"), ("#999", "unigram")].iter().enumerate()
        {
            let (x, y) = (WIDTH - RIGHT - 150.0, TOP + 10.0 + 18.0 * i as f64);
            add(format!("<path d=\"M{x} {y}h24\" stroke=\"{color}\" stroke-width=\"2\"/>"));
            add(format!("<text x=\"{}\" y=\"{}\">{name}</text>", x + 30.0, y + 4.0));
        }
        self.times(&x).into_iter().for_each(add);
        svg + "</svg>\n"
    }

    /// The elements of the step times; `x` is the place of a step.
    fn times(&self, x: &dyn Fn(f64) -> f64) -> Vec<String> {
        let ranks = self.times.iter().map(|(_, times)| times.len()).max().unwrap_or(0);
        let most = self.times.iter().flat_map(|(_, times)| times).copied().fold(0.0, f64::max);
        if ranks == 0 || most <= 0.0 {
            return Vec::new();
        }
        let (top, bottom) = (HEIGHT + 14.0, HEIGHT + TIMES_HEIGHT - 16.0);
        let y = |ms: f64| bottom - (bottom - top) * ms / most;
        let mut elements =
            vec![format!("<text x=\"{LEFT}\" y=\"{}\">time of a step in ms, by rank</text>", HEIGHT + 8.0)];
        for ms in [0.0, most] {
            let at = y(ms);
            elements.push(format!("<path d=\"M{LEFT} {at:.1}H{}\" stroke=\"#ddd\"/>", WIDTH - RIGHT));
            let label = format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{ms:.0}</text>", LEFT - 6.0, at + 4.0);
            elements.push(label);
        }
        let each = self.times.len().div_ceil(TIME_POINTS).max(1);
        for rank in 0..ranks {
            // The slowest of neighbouring steps, so that no outlier is lost.
            let slowest = |steps: &[(u64, Vec<f64>)]| {
                let time = steps.iter().filter_map(|(_, times)| times.get(rank)).copied().fold(0.0, f64::max);
                format!("{:.1},{:.1}", x(steps[0].0 as f64), y(time))
            };
            let points: Vec<String> = self.times.chunks(each).map(slowest).collect();
            let color = format!("hsl({:.0} 60% 45%)", rank as f64 * 137.5 % 360.0);
            elements.push(format!(
                "<polyline class=\"rank\" points=\"{}\" fill=\"none\" stroke=\"{color}\"/>",
                points.join(" ")
            ));
            if rank < RANK_NAMES {
                let (left, top) = (WIDTH - RIGHT - 52.0 * (ranks.min(RANK_NAMES) - rank) as f64, HEIGHT + 8.0);
                elements.push(format!("<text x=\"{left}\" y=\"{top}\" style=\"fill:{color}\">rank {rank}</text>"));
            }
        }
        elements
    }
}

/// A round distance between about five ticks of a range.
fn tick(range: f64) -> f64 {
    let power = 10f64.powf((range / 5.0).log10().floor());
    let unit = [1.0, 2.0, 5.0, 10.0].into_iter().find(|unit| unit * power * 5.0 >= range);
    unit.unwrap_or(10.0) * power
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The points of all lines of a picture.
    fn lines(picture: &str) -> Vec<Vec<(f64, f64)>> {
        let points = picture.split(" points=\"").skip(1).map(|s| s.split('"').next().unwrap());
        let point = |text: &str| {
            let (x, y) = text.split_once(',').unwrap();
            (x.parse().unwrap(), y.parse().unwrap())
        };
        points.map(|line| line.split(' ').filter(|text| !text.is_empty()).map(point).collect()).collect()
    }

    #[test]
    fn every_step_is_a_point_inside_the_picture() {
        let losses: Vec<(u64, f64)> = (0..40).map(|i| (i + 1, 4.0 - 0.05 * i as f64)).collect();
        let times: Vec<(u64, Vec<f64>)> = (0..40).map(|i| (i + 1, vec![10.0, 12.0 + i as f64])).collect();
        let held_out = [(20, 3.0), (40, f64::NAN)];
        let curves = Curves { losses: &losses, held_out: &held_out, unigram: 3.1, times: &times };
        for log in [false, true] {
            let picture = curves.svg("a <b>", log);
            assert!(picture.contains("a &lt;b&gt;") && picture.ends_with("</svg>\n"));
            let lines = lines(&picture);
            assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [2, 40, 1, 40, 40]);
            for (i, (x, y)) in lines.into_iter().enumerate().flat_map(|(i, line)| line.into_iter().map(move |p| (i, p)))
            {
                let heights = if i < 3 { TOP..=HEIGHT - BOTTOM } else { HEIGHT..=HEIGHT + TIMES_HEIGHT };
                assert!((LEFT..=WIDTH - RIGHT).contains(&x) && heights.contains(&y), "{x},{y} of line {i}");
            }
        }
    }

    #[test]
    fn a_logarithmic_axis_shows_equal_ratios_as_equal_distances() {
        let losses = [(1, 8.0), (2, 4.0), (3, 2.0)];
        let curves = Curves { losses: &losses, held_out: &[], unigram: 8.0, times: &[] };
        let trained = |log: bool| lines(&curves.svg("loss", log)).swap_remove(1);
        let distances = |points: Vec<(f64, f64)>| (points[1].1 - points[0].1, points[2].1 - points[1].1);
        let (first, second) = distances(trained(true));
        assert!((first - second).abs() < 0.2, "{first} and {second}");
        let (first, second) = distances(trained(false));
        assert!((first - 2.0 * second).abs() < 0.2, "{first} and {second}");
    }
}
