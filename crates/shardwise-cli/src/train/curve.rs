//! The loss curve as SVG.

use std::fmt::Write;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;

/// Draws the training losses and the held-out losses, as (number of steps, loss), and the unigram loss.
pub(crate) fn svg(title: &str, losses: &[(u64, f64)], held_out: &[(u64, f64)], unigram: f64) -> String {
    let all = losses.iter().map(|&(_, loss)| loss).chain(held_out.iter().map(|&(_, loss)| loss)).chain([unigram]);
    let (low, high) = all.filter(|x| x.is_finite()).fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)));
    let unit = tick((high - low).max(1e-3));
    let (low, high) = ((low / unit).floor() * unit, (high / unit).ceil() * unit);
    let steps = losses.last().map_or(0, |&(step, _)| step).max(2) as f64;
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * step / steps;
    let y = |loss: f64| TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{}</text>\n",
        escaped(title)
    );
    let mut add = |text: String| writeln!(svg, "{text}").expect("a string can be written to");
    let mut level = low;
    while level <= high + unit / 2.0 {
        let at = y(level);
        add(format!("<path d=\"M{LEFT} {at:.1}H{}\" stroke=\"#ddd\"/>", WIDTH - RIGHT));
        add(format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{level:.2}</text>", LEFT - 6.0, at + 4.0));
        level += unit;
    }
    let every = tick(steps).max(1.0);
    let mut step = 0.0;
    while step <= steps {
        add(format!(
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{step}</text>",
            x(step),
            HEIGHT - BOTTOM + 18.0
        ));
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
    for (i, (color, name)) in
        [("#1f77b4", "training"), ("#d62728", "held-out text"), ("#999", "unigram")].iter().enumerate()
    {
        let (x, y) = (WIDTH - RIGHT - 150.0, TOP + 10.0 + 18.0 * i as f64);
        add(format!("<path d=\"M{x} {y}h24\" stroke=\"{color}\" stroke-width=\"2\"/>"));
        add(format!("<text x=\"{}\" y=\"{}\">{name}</text>", x + 30.0, y + 4.0));
    }
    svg + "</svg>\n"
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

    #[test]
    fn every_step_is_a_point_inside_the_picture() {
        let losses: Vec<(u64, f64)> = (0..40).map(|i| (i + 1, 4.0 - 0.05 * i as f64)).collect();
        let picture = svg("a <b>", &losses, &[(20, 3.0), (40, f64::NAN)], 3.1);
        assert!(picture.contains("a &lt;b&gt;") && picture.ends_with("</svg>\n"));
        let lines: Vec<&str> = picture.split("points=\"").skip(1).map(|s| s.split('"').next().unwrap()).collect();
        let points: Vec<Vec<&str>> = lines.iter().map(|line| line.split(' ').collect()).collect();
        assert_eq!(points.iter().map(Vec::len).collect::<Vec<_>>(), [2, 40, 1]);
        for point in points.into_iter().flatten() {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y), "{point}");
        }
    }
}
