//! The page: where each panel lies and what is drawn in it.

use std::ops::Range;

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use rfdescent::estimation::Fit;

use super::axis::Axis;
use super::data::{PlotData, Quantiles, Scatter, StepSizes};
use super::panel::{Area, DASH, Drawn, GAP, GREY, MEAN, MODEL, POINT, Panel, Stroke};
use crate::error::CliError;

const WIDTH: u32 = 1100;
const TITLE: u32 = 40;
const HEAD: u32 = TITLE + 28;
const PADDING: i32 = 80;
const ROW: u32 = 330;

/// The SVG text.
pub fn draw(data: &PlotData, fit: &Fit) -> Result<String, CliError> {
    let mut text = String::new();
    page(&mut text, data, fit).map_err(|error| CliError::Data(format!("--plot: {error}")))?;
    Ok(text)
}

fn page(text: &mut String, data: &PlotData, fit: &Fit) -> Drawn {
    let rows = if data.step_sizes.is_some() { 4 } else { 3 };
    let root = SVGBackend::with_string(text, (WIDTH, HEAD + rows * ROW)).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!(
        "{} mini-batches, {} examples; relative deviation of the variance {:.2}",
        fit.batches, fit.examples, fit.relative_std
    );
    let (head, panels) = root.split_vertically(HEAD);
    head.titled(&title, ("sans-serif", 19))?;
    key(&head)?;
    let rows = panels.split_evenly((rows as usize, 1));
    let [losses, squared_losses, sq_grad_norms] = [0, 1, 2].map(|row| rows[row].split_evenly((1, 2)));

    let x = Axis::linear("quantile of N(0, 1)", data.loss_quantiles.quantiles());
    scatter(&losses[0], "Losses: mean μ", &data.losses, Axis::linear("loss L", data.losses.values()))?;
    quantiles(&losses[1], &data.loss_quantiles, x, "(L − μ)/√v")?;

    let title = "Squared losses: variance v = C(0) + C\u{2091}(0)/b";
    let y = Axis::logarithmic("(L − μ)²", data.squared_losses.values());
    scatter(&squared_losses[0], title, &data.squared_losses, y)?;
    let x = Axis::linear("quantile of χ²(1)", data.squared_loss_quantiles.quantiles());
    quantiles(&squared_losses[1], &data.squared_loss_quantiles, x, "(L − μ)²/v")?;

    let title = "Squared gradient norms: expectation e = −d (C'(0) + C\u{2091}'(0)/b)";
    let y = Axis::logarithmic("‖g‖²", data.sq_grad_norms.values());
    scatter(&sq_grad_norms[0], title, &data.sq_grad_norms, y)?;
    let label = format!("quantile of χ²(k)/k with k = {:.0}", data.degrees);
    let x = Axis::linear(label, data.sq_grad_norm_quantiles.quantiles());
    quantiles(&sq_grad_norms[1], &data.sq_grad_norm_quantiles, x, "‖g‖²/e")?;

    if let Some(sizes) = &data.step_sizes {
        step_sizes(&rows[3], sizes)?;
    }
    root.present()?;
    Ok(())
}

/// What the marks of both columns mean.
fn key(head: &Area) -> Drawn {
    let baseline = TITLE as i32 + 8;
    let text = |at: i32, what: &'static str| Text::new(what, (at + 26, baseline - 6), ("sans-serif", 13));
    let line = |at: i32| [(at, baseline), (at + 20, baseline)];
    let column = WIDTH as i32 / 2;
    for (at, what) in [(PADDING, "mini-batches"), (column + PADDING, "mini-batches, sorted")] {
        head.draw(&Circle::new((at + 10, baseline), 3, POINT.mix(0.45).filled()))?;
        head.draw(&text(at, what))?;
    }
    let at = PADDING + 125;
    head.draw(&Cross::new((at + 10, baseline), 4, MEAN.stroke_width(2)))?;
    head.draw(&text(at, "their means"))?;
    let at = at + 120;
    head.draw(&PathElement::new(line(at), MODEL.stroke_width(2)))?;
    head.draw(&text(at, "fit"))?;
    let at = at + 65;
    head.draw(&Rectangle::new([(at, baseline - 5), (at + 20, baseline + 5)], MODEL.mix(0.15).filled()))?;
    head.draw(&text(at, "95 % of them, by the fit"))?;
    let at = column + PADDING + 165;
    head.draw(&PathElement::new(line(at), MODEL.stroke_width(2)))?;
    head.draw(&text(at, "as the model says"))?;
    let at = at + 148;
    head.draw(&DashedPathElement::new(line(at), DASH, GAP, GREY.stroke_width(2)))?;
    head.draw(&text(at, "line through them"))?;
    Ok(())
}

fn scatter(area: &Area, title: &str, data: &Scatter, y: Axis) -> Drawn {
    let x = Axis::logarithmic("batch size b (examples)", data.expected.iter().map(|point| point.0));
    let mut panel = Panel::new(area, title, x, y)?;
    panel.band(&data.band)?;
    panel.points(&data.points)?;
    panel.line(&data.expected, MODEL, Stroke::Solid)?;
    panel.marks(&data.means)
}

fn quantiles(area: &Area, data: &Quantiles, x: Axis, name: &str) -> Drawn {
    let y = Axis::linear(name, data.points.iter().map(|point| point.1));
    let (intercept, slope) = data.line;
    let through = clipped(intercept, slope, &x.range(), &y.range());
    let model = clipped(0.0, 1.0, &x.range(), &y.range());
    let mut panel = Panel::new(area, "", x, y)?;
    panel.points(&data.points)?;
    panel.line(&through, GREY, Stroke::Dashed)?;
    panel.line(&model, MODEL, Stroke::Solid)
}

/// The part of a straight line within a rectangle; plotters would bend it at the edge.
fn clipped(intercept: f64, slope: f64, x: &Range<f64>, y: &Range<f64>) -> Vec<(f64, f64)> {
    let at = |x: f64| (x, intercept + slope * x);
    let (first, second) = ((y.start - intercept) / slope, (y.end - intercept) / slope);
    // With slope 0 these are infinite and leave the range of x as it is, unless the line lies outside.
    let (start, end) = (x.start.max(first.min(second)), x.end.min(first.max(second)));
    if start < end { vec![at(start), at(end)] } else { Vec::new() }
}

fn step_sizes(area: &Area, data: &StepSizes) -> Drawn {
    let x =
        Axis::logarithmic("gradient cost quotient Θ = ‖g‖/(μ − L)", data.steps.iter().map(|point| point.0));
    let highest = 2.0 * data.plateau;
    let y = Axis::logarithmic("step size η", data.steps.iter().map(|point| point.1).chain([highest]));
    let ends = [data.steps.first(), data.steps.last()];
    let plateau: Vec<_> = ends.into_iter().flatten().map(|point| (point.0, data.plateau)).collect();
    let asymptote: Vec<_> = data.asymptote.iter().copied().filter(|point| point.1 <= highest).collect();
    let mut panel = Panel::new(area, "Step sizes of the model, for exact losses and gradients", x, y)?;
    panel.named_line(&plateau, GREY, Stroke::Solid, Some("plateau"))?;
    panel.named_line(&asymptote, GREY, Stroke::Dashed, Some("A-RFD, the asymptote"))?;
    panel.named_line(&data.steps, MODEL, Stroke::Solid, Some("RFD"))?;
    panel.legend()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_where_it_leaves_the_panel() {
        let (x, y) = (-1.0..3.0, 0.0..1.0);
        assert_eq!(clipped(0.0, 1.0, &x, &y), [(0.0, 0.0), (1.0, 1.0)]);
        assert_eq!(clipped(0.5, 0.0, &x, &y), [(-1.0, 0.5), (3.0, 0.5)]);
        assert_eq!(clipped(1.0, -0.5, &x, &y), [(0.0, 1.0), (2.0, 0.0)]);
        assert!(clipped(5.0, 1.0, &x, &y).is_empty());
        assert!(clipped(5.0, 0.0, &x, &y).is_empty());
    }
}
