//! The course of a training: losses, step sizes and learning rates by step, all methods in one picture.

use plotters::element::PathElement;
use plotters::prelude::*;

use super::axis::Axis;
use super::panel::{Area, Drawn, MODEL, Panel, Stroke};
use crate::error::CliError;

/// Most points of a line: where there are more steps, each point is the mean of several.
const MOST_POINTS: usize = 500;
/// A line of fewer points has a dot at each.
const FEW: usize = 50;
/// Losses beyond this multiple of the largest first one are drawn there: one that diverges would flatten the
/// others.
const HIGHEST: f64 = 10.0;

const WIDTH: u32 = 1100;
const TITLE: u32 = 40;
const HEAD: u32 = TITLE + 32;
const ROW: u32 = 350;
const PADDING: i32 = 80;

/// Blue for SGD and green for Adam, from dark to pale in the order of the runs; the method itself has
/// [`MODEL`].
const SGD: [RGBColor; 3] = [RGBColor(20, 50, 120), RGBColor(70, 120, 200), RGBColor(150, 190, 235)];
const ADAM: [RGBColor; 3] = [RGBColor(20, 90, 50), RGBColor(60, 150, 90), RGBColor(150, 205, 160)];

/// What one run of a method shows; the first coordinate of each point is the step.
#[derive(Clone, Debug, Default)]
pub struct Curves {
    /// `fitted`, `adaptive`, `SGD` or `Adam`.
    pub method: &'static str,
    /// The learning rate that it was given.
    pub learning_rate: Option<f64>,
    /// The loss of each mini-batch.
    pub losses: Vec<(f64, f64)>,
    /// After each epoch, at its last step.
    pub validation_losses: Vec<(f64, f64)>,
    /// Of the steps that were taken.
    pub step_sizes: Vec<(f64, f64)>,
    /// Likewise.
    pub learning_rates: Vec<(f64, f64)>,
}

impl Curves {
    fn name(&self) -> String {
        match self.learning_rate {
            Some(rate) => format!("{} {rate}", self.method),
            None => self.method.into(),
        }
    }
}

/// The SVG text. Runs of one method and learning rate, of several seeds, share a colour.
pub fn svg(title: &str, runs: &[Curves]) -> Result<String, CliError> {
    let mut text = String::new();
    page(&mut text, title, runs).map_err(|error| CliError::Data(format!("--plot: {error}")))?;
    Ok(text)
}

fn page(text: &mut String, title: &str, runs: &[Curves]) -> Drawn {
    let root = SVGBackend::with_string(text, (WIDTH, HEAD + 2 * ROW)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, panels) = root.split_vertically(HEAD);
    head.titled(title, ("sans-serif", 19))?;
    let colors = colors(runs);
    key(&head, runs, &colors)?;
    let panels = panels.split_evenly((2, 2));

    let most = runs.iter().map(|run| run.losses.len()).max().unwrap_or_default().div_ceil(MOST_POINTS);
    let of = if most > 1 { format!(", means of {most} steps") } else { String::new() };
    let titles = ["Training loss", "Step size", "Learning rate"].map(|title| format!("{title}{of}"));
    let draw =
        |panel: usize, title: &str, label: &str, limit: f64, of: &dyn Fn(&Curves) -> Vec<(f64, f64)>| {
            let curves: Vec<_> = runs.iter().map(|run| drawable(of(run), limit)).collect();
            lines(&panels[panel], title, label, limit, runs, &colors, &curves)
        };
    let limit = highest(runs);
    draw(0, &titles[0], "loss", limit, &|run| thinned(&run.losses))?;
    draw(1, "Validation loss after each epoch", "loss", limit, &|run| run.validation_losses.clone())?;
    draw(2, &titles[1], "step size η", f64::INFINITY, &|run| thinned(&run.step_sizes))?;
    draw(3, &titles[2], "learning rate", f64::INFINITY, &|run| match run.learning_rate {
        Some(rate) => {
            [run.losses.first(), run.losses.last()].into_iter().flatten().map(|p| (p.0, rate)).collect()
        }
        None => thinned(&run.learning_rates),
    })?;
    root.present()?;
    Ok(())
}

fn highest(runs: &[Curves]) -> f64 {
    let first = runs.iter().filter_map(|run| run.losses.first()).map(|&(_, loss)| loss);
    let largest = first.filter(|&loss| loss.is_finite() && loss > 0.0).fold(0.0, f64::max);
    if largest > 0.0 { HIGHEST * largest } else { f64::INFINITY }
}

/// A logarithm needs numbers above 0; a loss that is none any more ends its line.
fn drawable(points: Vec<(f64, f64)>, limit: f64) -> Vec<(f64, f64)> {
    let finite = points.into_iter().take_while(|(_, value)| value.is_finite());
    finite.filter(|&(_, value)| value > 0.0).map(|(step, value)| (step, value.min(limit))).collect()
}

/// For each run its colour.
fn colors(runs: &[Curves]) -> Vec<RGBColor> {
    let mut named: Vec<(&str, Option<f64>)> = Vec::new();
    let color = |run: &Curves| {
        let palette = match run.method {
            "SGD" => SGD,
            "Adam" => ADAM,
            _ => return MODEL,
        };
        let this = (run.method, run.learning_rate);
        if !named.contains(&this) {
            named.push(this);
        }
        let mut same = named.iter().filter(|(method, _)| *method == run.method);
        palette[same.position(|other| *other == this).unwrap_or_default() % palette.len()]
    };
    runs.iter().map(color).collect()
}

/// The names of the runs, each once.
fn key(head: &Area, runs: &[Curves], colors: &[RGBColor]) -> Drawn {
    let baseline = TITLE as i32 + 10;
    let mut at = PADDING;
    let mut seen: Vec<String> = Vec::new();
    for (run, color) in runs.iter().zip(colors) {
        let name = run.name();
        if seen.contains(&name) {
            continue;
        }
        head.draw(&PathElement::new([(at, baseline), (at + 20, baseline)], color.stroke_width(2)))?;
        head.draw(&Text::new(name.clone(), (at + 26, baseline - 6), ("sans-serif", 13)))?;
        at += 60 + 8 * name.chars().count() as i32;
        seen.push(name);
    }
    Ok(())
}

/// One panel with a line for each run against the step, the first run on top.
fn lines(
    area: &Area,
    title: &str,
    label: &str,
    limit: f64,
    runs: &[Curves],
    colors: &[RGBColor],
    curves: &[Vec<(f64, f64)>],
) -> Drawn {
    // All panels have the same steps below them.
    let steps = runs.iter().flat_map(|run| run.losses.iter().map(|&(step, _)| step));
    let values = || curves.iter().flatten().map(|&(_, value)| value);
    let label = match values().any(|value| value == limit) {
        true => format!("{label} (above {limit:.0} drawn there)"),
        false => label.into(),
    };
    let y = Axis::logarithmic(label, values());
    let mut panel = Panel::new(area, title, Axis::linear("step", steps), y)?;
    for (curve, &color) in curves.iter().zip(colors).rev() {
        panel.line(curve, color, Stroke::Solid)?;
        if curve.len() < FEW {
            panel.dots(curve, color)?;
        }
    }
    Ok(())
}

/// At most [`MOST_POINTS`] points, each the mean of as many.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(MOST_POINTS).max(1);
    let mean = |points: &[(f64, f64)]| {
        let sums = points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        (sums.0 / points.len() as f64, sums.1 / points.len() as f64)
    };
    points.chunks(each).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(method: &'static str, learning_rate: Option<f64>, losses: &[f64]) -> Curves {
        let points: Vec<_> = (1..).map(f64::from).zip(losses.iter().copied()).collect();
        let own = if learning_rate.is_none() { points.clone() } else { Vec::new() };
        Curves {
            method,
            learning_rate,
            losses: points.clone(),
            validation_losses: points,
            step_sizes: own.clone(),
            learning_rates: own,
        }
    }

    fn drawn(runs: &[Curves]) -> String {
        let text = svg("title", runs).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        text
    }

    #[test]
    fn every_method_is_named_once_and_drawn_in_its_colour() {
        let runs = [
            run("adaptive", None, &[2.0, 1.0]),
            run("SGD", Some(1.0), &[2.0, 0.5]),
            run("SGD", Some(0.3), &[2.0, 0.6]),
            run("Adam", Some(0.01), &[2.0, 0.7]),
            run("adaptive", None, &[2.1, 1.1]),
            run("SGD", Some(0.3), &[2.0, 0.6]),
        ];
        assert_eq!(colors(&runs), [MODEL, SGD[0], SGD[1], ADAM[0], MODEL, SGD[1]]);
        let text = drawn(&runs);
        for name in ["adaptive", "SGD 1", "SGD 0.3", "Adam 0.01"] {
            assert_eq!(text.lines().filter(|line| line.trim() == name).count(), 1, "{name}: {text}");
        }
        for title in ["Training loss", "Validation loss after each epoch", "Step size", "Learning rate"] {
            assert!(text.contains(title), "{title}");
        }
        assert!(!text.contains("means of"));
    }

    #[test]
    fn any_course_is_drawn() {
        for losses in [
            &[][..],
            &[f64::NAN],
            &[0.0],
            &[2.0],
            &[2.0, f64::NAN, 3.0],
            &[2.0, f64::INFINITY],
            &[1e300, 1e-300],
            &[2.0, 2.0, 2.0],
        ] {
            drawn(&[run("adaptive", None, losses), run("SGD", Some(1.0), losses)]);
        }
        drawn(&[]);
        let text = drawn(&[run("adaptive", None, &[2.0, 1.0]), run("SGD", Some(1.0), &[2.0, 1e9])]);
        assert!(text.contains("above 20 drawn there"), "{text}");
    }

    #[test]
    fn many_steps_become_means() {
        let losses: Vec<f64> = (0..100_001).map(|i| f64::from(i % 2)).collect();
        let points = thinned(&run("adaptive", None, &losses).losses);
        assert!(points.len() <= MOST_POINTS);
        // Of the steps 1 to 201 every second one has loss 1, from the second on.
        assert_eq!(points[0], (101.0, 100.0 / 201.0));
        let mut run = run("adaptive", None, &losses);
        run.validation_losses.truncate(3);
        let text = drawn(&[run]);
        assert!(text.contains("means of 201 steps") && text.len() < 200_000, "{}", text.len());
    }
}
