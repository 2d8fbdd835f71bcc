//! The page: where each panel lies and what is drawn in it.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use rfdescent::estimation::Fit;

use super::axis::{Axis, Positions};
use super::data::{PlotData, Quantiles, Scatter, StepSizes};
use crate::error::CliError;

const WIDTH: u32 = 1100;
const TITLE: u32 = 40;
const HEAD: u32 = TITLE + 28;
const PADDING: i32 = 80;
const DASH: i32 = 6;
const GAP: i32 = 4;
const ROW: u32 = 330;

const POINT: RGBColor = RGBColor(70, 110, 170);
const MEAN: RGBColor = RGBColor(20, 40, 80);
const MODEL: RGBColor = RGBColor(200, 80, 30);
const GREY: RGBColor = RGBColor(110, 110, 110);

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

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
        fit.batches, fit.samples, fit.relative_std
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

enum Stroke {
    Solid,
    Dashed,
}

/// A chart with its axes; positions are the axes'.
struct Panel<'a, 'b> {
    chart: ChartContext<'a, SVGBackend<'b>, Cartesian2d<Positions, Positions>>,
    x: Axis,
    y: Axis,
}

impl<'a, 'b: 'a> Panel<'a, 'b> {
    fn new(area: &'a Area<'b>, title: &str, x: Axis, y: Axis) -> Result<Self, Box<dyn std::error::Error>> {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .margin_right(24)
            .caption(title, ("sans-serif", 16))
            .x_label_area_size(42)
            .y_label_area_size(68)
            .build_cartesian_2d(x.positions(), y.positions())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.08))
            .label_style(("sans-serif", 12))
            .axis_desc_style(("sans-serif", 14))
            .x_desc(x.label())
            .y_desc(y.label())
            .x_label_formatter(&|&position| x.tick_text(position))
            .y_label_formatter(&|&position| y.tick_text(position))
            .draw()?;
        Ok(Panel { chart, x, y })
    }

    fn at(&self, &(x, y): &(f64, f64)) -> (f64, f64) {
        (self.x.position(x), self.y.position(y))
    }

    fn points(&mut self, points: &[(f64, f64)]) -> Drawn {
        let style = POINT.mix(0.45).filled();
        let points: Vec<_> = points.iter().map(|point| Circle::new(self.at(point), 2, style)).collect();
        self.chart.draw_series(points)?;
        Ok(())
    }

    fn marks(&mut self, points: &[(f64, f64)]) -> Drawn {
        let style = MEAN.stroke_width(2);
        let points: Vec<_> = points.iter().map(|point| Cross::new(self.at(point), 4, style)).collect();
        self.chart.draw_series(points)?;
        Ok(())
    }

    fn line(&mut self, points: &[(f64, f64)], color: RGBColor, stroke: Stroke) -> Drawn {
        self.named_line(points, color, stroke, None)
    }

    /// With a name it appears in the panel's own legend.
    fn named_line(
        &mut self,
        points: &[(f64, f64)],
        color: RGBColor,
        stroke: Stroke,
        name: Option<&str>,
    ) -> Drawn {
        let style = color.stroke_width(2);
        let points: Vec<_> = points.iter().map(|point| self.at(point)).collect();
        let series = match stroke {
            Stroke::Solid => self.chart.draw_series(LineSeries::new(points, style))?,
            Stroke::Dashed => self.chart.draw_series(DashedLineSeries::new(points, DASH, GAP, style))?,
        };
        if let Some(name) = name {
            // A solid line is one dash.
            let dash = if matches!(stroke, Stroke::Solid) { 20 } else { DASH };
            series
                .label(name)
                .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 20, y)], dash, GAP, style));
        }
        Ok(())
    }

    fn band(&mut self, band: &[(f64, f64, f64)]) -> Drawn {
        let low = band.iter().map(|&(x, low, _)| self.at(&(x, low)));
        let high = band.iter().rev().map(|&(x, _, high)| self.at(&(x, high)));
        let outline: Vec<_> = low.chain(high).collect();
        self.chart.draw_series([Polygon::new(outline, MODEL.mix(0.15).filled())])?;
        Ok(())
    }

    fn legend(mut self) -> Drawn {
        self.chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .margin(8)
            .label_font(("sans-serif", 13))
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.2))
            .draw()?;
        Ok(())
    }
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
