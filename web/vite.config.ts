import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

export default defineConfig({
  base: '/ui/',
  plugins: [svelte({ compilerOptions: { runes: true } })],
  build: {
    target: 'es2022',
    cssTarget: ['chrome123', 'firefox120', 'safari17.5'],
    outDir: process.env.WINDLASS_WEB_DIST ?? 'dist',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    // One sheet for all pages: it compresses better, and no page is drawn before its styles are there.
    cssCodeSplit: false,
    sourcemap: false,
    reportCompressedSize: false,
    // Pages that are seldom opened compress better together.
    rolldownOptions: { output: { codeSplitting: { includeDependenciesRecursively: false, groups: [{ name: 'more', test: /src\/pages\/(Admin|Containers|Costs|Gateways|Projects?|Usage|Volumes|Events|Me)\.svelte|src\/components\/(Backends|Limits|Sharing|Tokens)\.svelte/ }] } } },
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 900,
  },
  worker: { format: 'es' },
});
